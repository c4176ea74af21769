"""Bars of an HTML page: memory by term, communication by mesh axes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

from meshwright.record import Collective, Record, wire_bytes
from meshwright.units import show_bytes, show_seconds
from meshwright.viz.colours import fill
from meshwright.viz.document import Section, html_table
from meshwright.viz.words import collective_note

_WIDTH, _LABEL, _ROW, _BAR = 1000, 190, 26, 18

NOT_TERMS = ("peak", "states", "host", "alias", "outputs", "code")
"""Entries of a record's memory that are sums of others, or lie in memory that others already count."""


@dataclass(frozen=True)
class Piece:
    """A part of a bar: its size, what it is called, and what is said when it is pointed at."""

    size: float
    name: str
    hint: str


def memory_section(records: Mapping[str, Record], usable_bytes: float | None) -> Section:
    """The memory of a device as each record has it, a bar each, beside what a program can have there.

    A record of a run has only its peak.
    """
    bars = {}
    for origin, record in records.items():
        terms = {name: size for name, size in record.memory_bytes.items() if name not in NOT_TERMS and size}
        terms = terms or {"peak": record.memory_bytes.get("peak", 0)}
        bars[f"{origin}  {show_bytes(record.memory_bytes.get('peak', 0))}"] = [
            Piece(size, name, f"{name}: {show_bytes(size)}") for name, size in terms.items() if size
        ]
    return Section("Memory of a device", _bars({name: bar for name, bar in bars.items() if bar}, usable_bytes))


def collectives_section(record: Record) -> Section:
    """What the collectives over each set of mesh axes send, as bars by kind and phase, and all of them as a table."""
    degrees = dict(record.mesh)
    bars: dict[str, list[Piece]] = {}
    for move in record.collectives:
        degree = math.prod(degrees[axis] for axis in move.axes)
        sent = wire_bytes(move.kind, move.bytes, degree) if move.axes else float(move.bytes)
        name = f"{move.kind} {move.phase}"
        bars.setdefault("*".join(move.axes) or "no axes", []).append(
            Piece(sent, name, f"{name}: {show_bytes(sent)} sent a device, {move.count} times")
        )
    rows = [_row(move) for move in sorted(record.collectives, key=lambda move: -move.bytes)]
    columns = ("collective", "over", "phase", "bytes a device", "times", "seconds", "exposed", "array", "from, note")
    return Section("Collectives by mesh axes", _bars(bars, None) + html_table(columns, rows, text=(0, 1, 2, 7, 8)))


def _row(move: Collective) -> tuple[str, ...]:
    """A collective as a line of the table."""
    times = ["–" if seconds is None else show_seconds(seconds) for seconds in (move.seconds, move.exposed_seconds)]
    said = "; ".join(filter(None, (move.source, collective_note(move))))
    return (
        move.kind,
        "*".join(move.axes),
        move.phase,
        show_bytes(move.bytes),
        str(move.count),
        *times,
        move.array,
        said,
    )


def _bars(bars: Mapping[str, Sequence[Piece]], limit: float | None) -> str:
    """Bars of pieces on one scale, with the names of the pieces below, and a line at a limit."""
    longest = max((sum(piece.size for piece in pieces) for pieces in bars.values()), default=0.0)
    if not longest:
        return ""
    # A limit far beyond every bar would leave nothing of them.
    shows_limit = limit is not None and limit < 20 * longest
    scale = (_WIDTH - _LABEL - 10) / max(longest, limit if shows_limit and limit else 0.0)
    colours = {name: index for index, name in enumerate(dict.fromkeys(p.name for bar in bars.values() for p in bar))}
    drawn = []
    for number, (label, pieces) in enumerate(bars.items()):
        y, x = number * _ROW, float(_LABEL)
        drawn.append(f'<text x="0" y="{y + 14}">{escape(label)}</text>')
        for piece in pieces:
            width = piece.size * scale
            drawn.append(
                f'<rect x="{x:.1f}" y="{y}" width="{max(width, 0.5):.1f}" height="{_BAR}"'
                f' fill="{fill(colours[piece.name])}" stroke="#888" stroke-width=".5">'
                f"<title>{escape(piece.hint)}</title></rect>"
            )
            x += width
    height = len(bars) * _ROW
    if shows_limit and limit:
        x = _LABEL + limit * scale
        drawn.append(f'<line x1="{x:.1f}" y1="0" x2="{x:.1f}" y2="{height}" stroke="#c0392b" stroke-dasharray="4 3"/>')
        drawn.append(f'<text x="{x - 4:.1f}" y="{height - 8}" text-anchor="end">{escape(show_bytes(limit))}</text>')
    legend, bottom = _legend(colours, height + 18)
    return f'<svg viewBox="0 0 {_WIDTH} {bottom}" role="img">\n' + "\n".join(drawn + legend) + "\n</svg>\n"


def _legend(colours: Mapping[str, int], top: float) -> tuple[list[str], float]:
    """A square and a name for each kind of piece, in rows, and where they end."""
    drawn, x, y = [], 0.0, top
    for name, colour in colours.items():
        width = 26 + 7 * len(name)
        if x + width > _WIDTH:
            x, y = 0.0, y + 20
        drawn.append(f'<rect x="{x:.1f}" y="{y - 10:.1f}" width="11" height="11" fill="{fill(colour)}" stroke="#888"/>')
        drawn.append(f'<text x="{x + 16:.1f}" y="{y:.1f}">{escape(name)}</text>')
        x += width
    return drawn, y + 10
