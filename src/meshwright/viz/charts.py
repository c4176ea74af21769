"""Charts of records: scaling, parts of the step, memory, network roofline."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from meshwright.errors import MeshwrightError
from meshwright.files import check_output, write_file
from meshwright.record import Record, wire_bytes
from meshwright.units import show_rate

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SUFFIXES = (".png", ".svg", ".pdf")
"""The file formats of a chart."""


@dataclass(frozen=True)
class Bar:
    """A record and the label under its bar. size: its position on the scale of a sweep."""

    label: str
    record: Record
    size: int | None = None


@dataclass(frozen=True)
class RooflinePoint:
    """A step on the network roofline: flops per byte sent, flops per second, and the bandwidth of its links."""

    intensity: float
    flops_per_second: float
    link_bytes_per_second: float


def check_chart_file(path: Path) -> None:
    """Raise where a chart cannot be written to a path, before anything is computed."""
    if path.suffix not in SUFFIXES:
        raise MeshwrightError(f"--plot {path} has no known kind; it ends in {', '.join(SUFFIXES)}")
    check_output(path)


@dataclass(frozen=True)
class Limits:
    """A device's peak flops per second, and the bytes a program can use."""

    flops_per_second: float
    usable_bytes: float


def write_charts(bars: Sequence[Bar], path: Path, limits: Limits, *, title: str, scale: str = "") -> None:
    """Write the charts of some records to a file; its suffix sets the format.

    Four charts: step time and MFU over `scale` (the key of a sweep; bars by mesh if it is empty), the parts of the
    step, the memory of a device and its limit, and the network roofline.
    """
    check_chart_file(path)
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 8), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title)
    (speed, parts), (memory, roof) = figure.subplots(2, 2)
    _draw_speed(speed, bars, scale)
    _draw_stack(parts, bars, [bar.record.breakdown_seconds for bar in bars], "step, s", scale)
    _draw_memory(memory, bars, limits.usable_bytes, scale)
    _draw_roofline(roof, bars, limits.flops_per_second)
    _save(figure, path)


def roofline_point(record: Record) -> RooflinePoint | None:
    """A step on the network roofline; None where it communicates nothing or has no time.

    The bandwidth is that of the step's own collectives: all bytes a device sends over all the time they take.
    """
    degrees = dict(record.mesh)
    sent = seconds = 0.0
    for move in record.collectives:
        degree = 1
        for axis in move.axes:
            degree *= degrees[axis]
        sent += wire_bytes(move.kind, move.bytes, degree)
        seconds += move.seconds or 0.0
    if not sent or not seconds or not record.flops or not record.step_seconds:
        return None
    return RooflinePoint(record.flops / sent, record.flops / record.step_seconds, sent / seconds)


def _draw_speed(axes: Axes, bars: Sequence[Bar], scale: str) -> None:
    """Step time and MFU: curves beside ideal scaling over a scale, else bars of MFU."""
    shares = [100 * (bar.record.mfu or 0.0) for bar in bars]
    if not scale:
        axes.bar(range(len(bars)), shares)
        _name_bars(axes, bars, "")
        axes.set_ylabel("MFU, %")
        return
    sizes = [bar.size or 0 for bar in bars]
    steps = [bar.record.step_seconds or 0.0 for bar in bars]
    power = -1 if scale == "chips" else 1
    ideal = [steps[0] * (size / sizes[0]) ** power for size in sizes]
    axes.loglog(sizes, steps, "o-", label="step, s")
    axes.loglog(sizes, ideal, ":", color="gray", label="in proportion to the first")
    axes.set_xticks(sizes, [f"{size:,}" for size in sizes])
    axes.minorticks_off()
    axes.set_xlabel(scale)
    axes.set_ylabel("step, s")
    beside = axes.twinx()
    beside.plot(sizes, shares, "s--", color="tab:green")
    beside.set_ylim(0, 100)
    beside.set_ylabel("MFU, % (dashed)")
    axes.legend(loc="best")


def _draw_stack(
    axes: Axes, bars: Sequence[Bar], amounts: Sequence[Mapping[str, float]], label: str, scale: str
) -> None:
    """Stacked bars of named amounts, one bar a record."""
    names = list(dict.fromkeys(name for terms in amounts for name, amount in terms.items() if amount))
    bottoms = [0.0] * len(bars)
    for name in names:
        heights = [terms.get(name, 0.0) for terms in amounts]
        axes.bar(range(len(bars)), heights, bottom=bottoms, label=name)
        bottoms = [low + height for low, height in zip(bottoms, heights, strict=True)]
    _name_bars(axes, bars, scale)
    axes.set_ylabel(label)
    axes.legend(fontsize="small")


def _draw_memory(axes: Axes, bars: Sequence[Bar], usable_bytes: float, scale: str) -> None:
    """The terms of a device's memory in GB, and its limit."""
    terms = [
        {name: size / 1e9 for name, size in bar.record.memory_bytes.items() if name in memory_terms(bar.record)}
        for bar in bars
    ]
    _draw_stack(axes, bars, terms, "memory of a device, GB", scale)
    axes.axhline(usable_bytes / 1e9, color="black", linestyle="--", label="usable")
    axes.legend(fontsize="small")


def memory_terms(record: Record) -> tuple[str, ...]:
    """The terms that sum to a record's peak, without subtotals."""
    return tuple(name for name in record.memory_bytes if name not in ("peak", "states", "host"))


def _draw_roofline(axes: Axes, bars: Sequence[Bar], peak: float) -> None:
    """Flops per second over flops per byte sent, under the peak and the slope of the links."""
    points = [(bar, point) for bar in bars if (point := roofline_point(bar.record))]
    axes.axhline(peak, color="black")
    for rate in {f"{point.link_bytes_per_second:.2g}": point.link_bytes_per_second for _, point in points}.values():
        axes.axline((1.0, rate), (peak / rate, peak), color="gray", linestyle="--", linewidth=1)
        axes.annotate(show_rate(rate, "B/s"), (peak / rate / 8, peak / 8), fontsize="small", color="gray")
    for bar, point in points:
        axes.plot([point.intensity], [point.flops_per_second], "o", label=bar.label)
    axes.set_xscale("log")
    axes.set_yscale("log")
    if points:
        ridge = min(peak / point.link_bytes_per_second for _, point in points)
        axes.set_xlim(min(ridge, *(p.intensity for _, p in points)) / 10, max(p.intensity for _, p in points) * 5)
        axes.legend(fontsize="small")
    axes.set_ylim(peak / 100, peak * 1.5)
    axes.set_xlabel("flops a byte sent on the network")
    axes.set_ylabel("flops a second of a device")


def _name_bars(axes: Axes, bars: Sequence[Bar], scale: str) -> None:
    axes.set_xticks(range(len(bars)), [bar.label for bar in bars], rotation=0 if len(bars) < 5 else 30, fontsize=8)
    axes.set_xlabel(scale)


def _save(figure: Figure, path: Path) -> None:
    """Write a figure in the format that the name ends in."""
    drawn = io.BytesIO()
    figure.savefig(drawn, format=path.suffix[1:], dpi=150)
    write_file(path, drawn.getvalue())
