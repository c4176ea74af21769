"""`meshwright.chips`: the known chips and their figures, such as peak flops; for one chip, also the sources."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from meshwright.description.hardware.chip import Chip, SliceForm, Torus
from meshwright.description.hardware.load import chips as known_chips
from meshwright.description.hardware.load import load_chip, load_hardware
from meshwright.errors import MeshwrightError
from meshwright.pictures.answers.answer import Answer
from meshwright.pictures.tables import console, show, table
from meshwright.pictures.text import folded, wrap
from meshwright.units import show_bytes, show_percent, show_rate, show_seconds


@dataclass(frozen=True, repr=False)
class Chips(Answer):
    """Some chips. Several are printed as a table, one in full with the source of each figure."""

    chips: tuple[Chip, ...]

    def to_json(self) -> dict[str, Any]:
        """Return the chips as plain data, in the schema of `meshwright chips --json`."""
        return {"chips": [asdict(chip) for chip in self.chips]}

    def print(self) -> None:
        """Print the table of chips, or one chip in full."""
        if len(self.chips) == 1:
            chip = self.chips[0]
            many = "1 device" if chip.devices_per_chip == 1 else f"{chip.devices_per_chip} devices"
            show(console(), f"{chip.name} · {chip.title} · {many} a chip, {chip.chips_per_host} chips a host")
            for part, title, figures in _parts(chip):
                print(f"\n {title}")
                show(console(), table(("", "", ""), [("", *figure) for figure in figures.items()], left=(0, 1, 2)))
                source = f"source: {chip.sources[part]}"
                print("\n".join(wrap(source, first="  ", then="  ")))
            return
        columns = ("chip", "bf16", "int8", "HBM", "bandwidth", "links", "largest slice")
        show(console(), table(columns, map(_row, self.chips), left=(0, 5, 6)))
        print()
        print(
            folded(
                "a chip's figures: operations per second of dense matmuls, HBM as sold, links one way; for GPUs the"
                " last column is the bandwidth out of a node"
            )
        )


def chips(name: str | None = None, *, hardware: str | Path | None = None) -> Chips:
    """Return the chips for which plans can be made, with their peak rates, memory, links and slices.

    Args:
        name: the name or alias of one chip, such as "v5e" or "H100"; by default all chips.
        hardware: a TOML file that describes your own chip, which is checked and returned instead.

    Raises:
        MeshwrightError: the name is unknown, the file is invalid, or both are given.

    >>> chips("H100").chips[0].peak("bf16")
    989000000000000.0
    """
    if name is not None and hardware is not None:
        raise MeshwrightError(f"--hardware {hardware} has a chip of its own; leave {name!r} out")
    if hardware is not None:
        return Chips((load_hardware(hardware),))
    return Chips(known_chips() if name is None else (load_chip(name),))


def _row(chip: Chip) -> tuple[str, ...]:
    """Return a chip's row of the table."""
    int8 = chip.peak_flops.get("int8")
    if torus := chip.torus:
        links = f"{torus.rank}D torus, {show_rate(torus.link_bytes_per_second, 'B/s')}"
        largest = _shape(torus.max_slice)
    else:  # For GPUs, this column has the bandwidth out of a node instead of the largest slice.
        node, *beyond = chip.levels
        links = f"{node.name} of {node.degree}, {show_rate(node.link_bytes_per_second, 'B/s')}"
        largest = f"{show_rate(beyond[0].link_bytes_per_second, 'B/s')} a {node.name}" if beyond else ""
    return (
        chip.name,
        show_rate(chip.peak(), "flop"),
        show_rate(int8, "op") if int8 else "-",
        show_bytes(chip.hbm_bytes),
        show_rate(chip.hbm_bytes_per_second, "B/s"),
        links,
        largest,
    )


def _shape(sizes: tuple[int, ...]) -> str:
    """Return the shape of a slice as users type it: `4x4x4`."""
    return "x".join(map(str, sizes))


def _parts(chip: Chip) -> Iterator[tuple[str, str, dict[str, str]]]:
    """Yield (key in `Chip.sources`, title, figures as text by name) for each part of a chip's description."""
    yield (
        "peak_flops",
        "peak of dense matmuls",
        {dtype: show_rate(peak, "flop/s") for dtype, peak in chip.peak_flops.items()},
    )
    yield (
        "hbm",
        "memory",
        {
            "as sold": show_bytes(chip.hbm_bytes),
            "physical": show_bytes(chip.physical_bytes),
            "kept by the runtime": show_bytes(chip.runtime_bytes),
            "left for programs": show_bytes(chip.usable_bytes),
            "bandwidth": show_rate(chip.hbm_bytes_per_second, "B/s"),
        },
    )
    if "power" in chip.sources:
        yield "power", "power", {"limit": f"{show_percent(chip.power_share)} of what the die is otherwise sold with"}
    if "kernels" in chip.sources:
        yield "kernels", "kernels", {"heads of cuDNN's fused attention": f"up to {chip.attention_head_dim} dims"}
    if chip.torus:
        yield "torus", "torus", _torus_figures(chip)
        if "compiler" in chip.sources:
            yield "compiler", "compiler, over all chips of a slice", _compiler_figures(chip.torus)
    if small := chip.small_ops:
        figures = {
            "least time": show_seconds(small.least_seconds),
            "weights read meanwhile": show_percent(small.read_ahead),
        }
        yield "small_ops", "ops of a decode step, by the compiler's estimates", figures
    for index, level in enumerate(chip.levels):
        figures = {
            "units joined": str(level.degree),
            "out of each unit": show_rate(level.link_bytes_per_second, "B/s"),
            "hop": show_seconds(level.hop_seconds),
        }
        yield f"levels.{index}", level.name, figures
    if chip.dcn:
        egress, hop = show_rate(chip.dcn.bytes_per_second, "B/s"), show_seconds(chip.dcn.hop_seconds)
        yield "dcn", "data-centre network", {"out of each chip": egress, "hop": hop}
    yield "host", "host", {"to and from it": show_rate(chip.host_bytes_per_second, "B/s")}


_FORMS: Mapping[SliceForm, str] = {
    "square": "4x4, 8x8, …",
    "solid": "longer than 1 along each axis",
    "wrapped": "rings",
}


def _compiler_figures(torus: Torus) -> dict[str, str]:
    """Return on which slices collectives over all chips run as all-reduces, as text by kind of collective."""
    forms: dict[str, SliceForm | None] = {"reduce-scatter": torus.summed_scatters, "all-gather": torus.summed_gathers}
    return {kind: f"an all-reduce on slices: {_FORMS[form]}" for kind, form in forms.items() if form}


def _torus_figures(chip: Chip) -> dict[str, str]:
    """Return the figures of a chip's torus as text, by name."""
    torus = chip.torus
    assert torus
    rings = f"whole cubes of {_shape((torus.cube,) * torus.rank)}" if torus.cube else f"axes of {torus.wrap_size}"
    figures = {
        "link, one way": show_rate(torus.link_bytes_per_second, "B/s"),
        "axis, both ways": show_rate(torus.axis_bytes_per_second, "B/s"),
        "hop": show_seconds(torus.hop_seconds),
        "rings": rings,
        "host": _shape(torus.host),
        "largest slice": _shape(torus.max_slice),
        "slices": ", ".join(map(_shape, torus.slices)),
    }
    if torus.splits_axes:
        figures["mesh axes"] = "two may share a physical one"
    if torus.core_bytes_per_second:
        figures["between a chip's devices"] = show_rate(torus.core_bytes_per_second, "B/s")
    return figures
