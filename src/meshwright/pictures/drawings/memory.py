"""Draw the memory of a device by term, with the usable memory."""

from __future__ import annotations

from collections.abc import Mapping

from meshwright.pictures.charts import NOT_TERMS
from meshwright.pictures.colours import named
from meshwright.pictures.panels import Cell, Panel, Sketch
from meshwright.units import show_bytes, show_percent

_BAR = 40
"""The length in characters of the bar of the usable memory."""


def memory_sketch(memory_bytes: Mapping[str, int], usable_bytes: float) -> Sketch:
    """Draw a bar for each term of a device's memory, for their peak, and for the memory that a program can use.

    memory_bytes: as in `Record.memory_bytes`.
    """
    peak = memory_bytes["peak"]
    terms = {name: size for name, size in memory_bytes.items() if name not in NOT_TERMS and size}
    bars = {**dict(sorted(terms.items(), key=lambda item: -item[1])), "peak": peak, "usable": usable_bytes}
    longest = max(bars.values())
    cells = tuple(
        (
            Cell(show_bytes(size)),
            Cell(show_percent(size / usable_bytes)),
            Cell("█" * round(size / longest * _BAR) or "|"),
        )
        for size in bars.values()
    )
    plain = named("idle")
    panel = Panel(
        cells=cells,
        rows=tuple(bars),
        row_fills=tuple(named(name) if name in terms else plain for name in bars),
        columns=("bytes", "of usable", ""),
        frame="table",
    )
    fits = "fits" if peak <= usable_bytes else "DOES NOT FIT"
    title = f"memory of a device   peak {show_bytes(peak)} of {show_bytes(usable_bytes)} that a program can use: {fits}"
    return Sketch(title=title, panels=(panel,))
