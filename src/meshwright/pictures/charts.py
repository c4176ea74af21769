"""Charts of records: scaling, parts of the step time, memory, network roofline."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from meshwright.errors import MeshwrightError
from meshwright.pictures.colours import INK, RULE, WRONG, named
from meshwright.record import Record, wire_bytes
from meshwright.support.extras import require_extra
from meshwright.support.files import check_output, write_file
from meshwright.units import show_bytes, show_percent, show_rate, show_seconds

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure

SUFFIXES = (".png", ".svg", ".pdf")
"""The suffixes that the name of a chart file may have."""


NOT_TERMS = ("peak", "states", "host", "alias", "outputs", "code")
"""Memory terms of a record that are sums of other terms, or share memory with them."""

ON_WHITE = {"facecolor": "white", "edgecolor": "none", "pad": 1}
"""The background of a text that a line may cross."""


@dataclass(frozen=True)
class Bar:
    """A record to draw.

    label: the text at its bar; its first word is a short name of the record. size: in a sweep, the value of the swept
    quantity.
    """

    label: str
    record: Record
    size: int | None = None


@dataclass(frozen=True)
class DeviceLimits:
    """A device's peak flops per second, and the bytes of its memory that a program can use."""

    flops_per_second: float
    usable_bytes: float


class RooflinePoint(NamedTuple):
    """A step on the network roofline, per device.

    intensity: flops per byte sent. link_bytes_per_second: the bandwidth that its collectives reach.
    """

    intensity: float
    flops_per_second: float
    link_bytes_per_second: float


def check_chart_file(path: Path) -> None:
    """Raise if a chart cannot be written to a path; called before anything is computed."""
    if path.suffix not in SUFFIXES:
        raise MeshwrightError(f"--plot {path} has no known kind; it ends in {', '.join(SUFFIXES)}")
    require_extra("--plot", "charts")
    check_output(path)


def write_charts(bars: Sequence[Bar], path: Path, limits: DeviceLimits, *, title: str, scale: str = "") -> None:
    """Write four charts of some records to a file, whose suffix sets the format.

    They are MFU as bars, or for a sweep the step time and MFU over the swept quantity; the parts of the step; the
    memory of a device and its limit; the network roofline.

    scale: the quantity that a sweep changes, such as `chips`; '' if the records are not a sweep.
    """
    check_chart_file(path)
    figure = new_figure(14, max(9.0, 4.5 + 0.9 * len(bars)), title)
    (speed, parts), (roof, memory) = figure.subfigures(2, 2, squeeze=False, wspace=0.03, hspace=0.03)
    if scale:
        _draw_scaling(speed, bars, scale)
    else:
        shares = [{"MFU": 100 * (bar.record.mfu or 0.0)} for bar in bars]
        _draw_bars(speed, bars, shares, [show_percent(share["MFU"] / 100) for share in shares]).set_xlabel("MFU, %")
    steps = [bar.record.step_seconds or 1.0 for bar in bars]
    terms = [bar.record.breakdown_seconds for bar in bars]
    if scale:  # Steps of a sweep differ by powers of two: shares can be compared.
        terms = [
            {name: 100 * seconds / step for name, seconds in term.items()}
            for term, step in zip(terms, steps, strict=True)
        ]
    axes = _draw_bars(parts, bars, terms, [show_seconds(step) for step in steps])
    axes.set_xlabel("parts of the step, %" if scale else "step, s")
    _draw_memory(memory, bars, limits.usable_bytes)
    _draw_roofline(roof, bars, limits.flops_per_second)
    save_figure(figure, path)


def new_figure(width: float, height: float, title: str) -> Figure:
    """Return an empty figure of this width and height in inches."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height))
    figure.set_layout_engine("constrained", w_pad=0.1, h_pad=0.08)
    FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize="x-large")
    return figure


def save_figure(figure: Figure, path: Path) -> None:
    """Write a figure atomically; the file's suffix sets the format."""
    drawn = io.BytesIO()
    figure.savefig(drawn, format=path.suffix[1:], dpi=150)
    write_file(path, drawn.getvalue())


def roofline_point(record: Record) -> RooflinePoint | None:
    """Return a step's point on the network roofline; None if the step has no collectives or no times.

    The bandwidth is the average over the step's collectives: the bytes that a device sends, divided by their time.
    """
    degrees = dict(record.mesh)
    sent = seconds = 0.0
    for move in record.own_collectives:
        sent += wire_bytes(move.kind, move.bytes, math.prod(degrees[axis] for axis in move.axes))
        seconds += move.seconds or 0.0
    if not sent or not seconds or not record.flops or not record.step_seconds:
        return None
    return RooflinePoint(record.flops / sent, record.flops / record.step_seconds, sent / seconds)


def _draw_scaling(figure: SubFigure, bars: Sequence[Bar], scale: str) -> None:
    """Draw the step time of a sweep over `scale`, and its MFU; dotted: ideal scaling from the first record."""
    from matplotlib.ticker import LogLocator

    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    sizes = [bar.size or 0 for bar in bars]
    steps = [bar.record.step_seconds or 0.0 for bar in bars]
    power = -1 if scale == "chips" else 1
    above.loglog(sizes, [steps[0] * (size / sizes[0]) ** power for size in sizes], ":", color=RULE)
    above.loglog(sizes, steps, "o-", color=INK)
    for size, step in zip(sizes, steps, strict=True):
        _annotate(above, show_seconds(step), size, step, up=9)
    above.set_title("step: solid; in proportion to the first: dotted", fontsize="medium", loc="left")
    above.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    above.yaxis.set_major_formatter(lambda seconds, _: show_seconds(seconds))
    above.margins(x=0.1, y=0.2)
    shares = [100 * (bar.record.mfu or 0.0) for bar in bars]
    below.plot(sizes, shares, "o-", color=INK)
    for size, share in zip(sizes, shares, strict=True):
        _annotate(below, show_percent(share / 100), size, share, up=7)
    below.set_ylim(0, max(100.0, *shares) * 1.2)
    below.set_yticks((0, 50, 100))
    below.set_ylabel("MFU, %")
    below.set_xticks(sizes, [f"{size:,}" for size in sizes])
    below.set_xlabel(scale)
    for axes in (above, below):
        axes.minorticks_off()
        hide_empty_sides(axes)


def _draw_bars(
    figure: SubFigure, bars: Sequence[Bar], amounts: Sequence[Mapping[str, float]], totals: Sequence[str]
) -> Axes:
    """Draw a stacked horizontal bar for each record, the first on top, and a legend above; return the axes.

    amounts: the parts of each bar, by name. totals: a text at the end of each bar.
    """
    axes = figure.subplots()
    names = list(dict.fromkeys(name for terms in amounts for name, amount in terms.items() if amount))
    rows, starts = range(len(bars)), [0.0] * len(bars)
    for name in names:
        widths = [terms.get(name, 0.0) for terms in amounts]
        axes.barh(rows, widths, left=starts, label=name, color=named(name), edgecolor="white", linewidth=0.5)
        starts = [start + width for start, width in zip(starts, widths, strict=True)]
    for row, end, total in zip(rows, starts, totals, strict=True):
        axes.annotate(total, (end, row), (4, 0), textcoords="offset points", va="center", bbox=ON_WHITE)
    axes.set_yticks(rows, [bar.label for bar in bars])
    axes.invert_yaxis()
    axes.set_xlim(0, 1.15 * max(starts, default=1.0))
    hide_empty_sides(axes)
    if len(names) > 1:
        figure.legend(loc="outside upper left", ncols=4, frameon=False)
    return axes


def _draw_memory(figure: SubFigure, bars: Sequence[Bar], usable_bytes: float) -> None:
    """Draw the terms of a device's memory in GB, and its limit."""
    terms = [
        {name: size / 1e9 for name, size in bar.record.memory_bytes.items() if name not in NOT_TERMS} for bar in bars
    ]
    axes = _draw_bars(figure, bars, terms, [show_bytes(sum(term.values()) * 1e9) for term in terms])
    axes.set_xlabel("memory of a device, GB")
    axes.set_xlim(0, 1.1 * max(usable_bytes / 1e9, axes.get_xlim()[1] / 1.15))
    axes.axvline(usable_bytes / 1e9, color=WRONG, linestyle="--")
    said = f"usable {show_bytes(usable_bytes)}"
    axes.annotate(said, (usable_bytes / 1e9, 1), (0, 3), xycoords=("data", "axes fraction"), color=WRONG, ha="center",
                  textcoords="offset points")  # fmt: skip


def _draw_roofline(figure: SubFigure, bars: Sequence[Bar], peak: float) -> None:
    """Draw the records on the network roofline: flops per second over flops per byte sent.

    peak: flops per second of a device. The slopes are the lowest and highest link bandwidth of the records.
    """
    from matplotlib.ticker import LogLocator

    axes = figure.subplots()
    axes.set_title("network roofline", fontsize="medium", loc="left")
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.axhline(peak, color=INK)
    points = [(bar, point) for bar in bars if (point := roofline_point(bar.record))]
    rates = sorted(point.link_bytes_per_second for _, point in points)
    if points:
        ridge = peak / rates[-1]
        first = min(ridge, *(point.intensity for _, point in points)) / 8
        last = max(peak / rates[0], *(point.intensity for _, point in points)) * 5
        axes.set_xlim(first, last)
        axes.set_ylim(min(first * rates[0], *(point.flops_per_second / 3 for _, point in points)), peak * 2.5)
        for rate in (rates[0], rates[-1]):
            axes.axline((1.0, rate), (peak / rate, peak), color=RULE, linestyle="--", linewidth=1)
        said = " to ".join(dict.fromkeys(show_rate(rate, "B/s") for rate in (rates[0], rates[-1])))
        _annotate(axes, f"links: {said}", peak / rates[0] / 6, peak / 6, up=-4, left=-8, ha="left")
        _annotate(axes, f"peak {show_rate(peak, 'flop/s')}", last, peak, up=4, left=4, ha="right")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(lambda rate, _: show_rate(rate, "flop/s"))
    axes.minorticks_off()
    axes.set_xlabel("flops a byte sent on the network")
    hide_empty_sides(axes)
    if points:
        _draw_points(axes, [(bar.label.split()[0], point) for bar, point in points])


def _draw_points(axes: Axes, points: Sequence[tuple[str, RooflinePoint]]) -> None:
    """Draw labelled points, with each label below its point so that it overlaps no other label and no point.

    points: (label, point) of each record.
    """
    places = [(point.intensity, point.flops_per_second) for _, point in points]
    axes.plot(*zip(*places, strict=True), "o", color=INK)
    figure = axes.get_figure(root=True)
    assert figure is not None
    figure.draw_without_rendering()  # This determines the positions of points on the page.
    in_points = [(x * 72 / figure.dpi, y * 72 / figure.dpi) for x, y in axes.transData.transform(places)]
    for (label, _), place, down in zip(
        points, places, label_distances([label for label, _ in points], in_points), strict=True
    ):
        line = {"arrowstyle": "-", "color": RULE, "linewidth": 0.7, "shrinkB": 3} if down > _BELOW else None
        axes.annotate(label, place, (0, -down), textcoords="offset points", ha="center", va="top", arrowprops=line)


_BELOW = 6.0
"""The smallest distance in points from the middle of a mark to the top of the label below it."""


_HIGH, _WIDE = 13.0, 6.5
"""The height of a label and the width of its letters, in points."""


def label_distances(labels: Sequence[str], places: Sequence[tuple[float, float]]) -> list[float]:
    """Return each label's distance below its mark, in points, so that no label touches another label or a mark.

    places: (x, y) of each mark, in points.
    """
    marks = [(x - 4, x + 4, y - 4, y + 4) for x, y in places]
    taken: list[tuple[float, float, float, float]] = []  # left, right, bottom, top
    found = [0.0] * len(places)
    for index in sorted(range(len(places)), key=places.__getitem__):
        label, (x, y) = labels[index], places[index]
        left, right = x - _WIDE * len(label) / 2 - 2, x + _WIDE * len(label) / 2 + 2
        others = [*taken, *marks[:index], *marks[index + 1 :]]
        below = [(bottom, top) for start, end, bottom, top in others if start < right and left < end]
        down = _BELOW
        while any(bottom < y - down and y - down - _HIGH < top for bottom, top in below):
            down += _HIGH / 2
        taken.append((left, right, y - down - _HIGH, y - down))
        found[index] = down
    return found


def _annotate(axes: Axes, text: str, x: float, y: float, *, up: float, left: float = 0, ha: str = "center") -> None:
    """Draw a text `up` points above and `left` points to the left of (x, y)."""
    axes.annotate(text, (x, y), (-left, up), textcoords="offset points", ha=ha)


def hide_empty_sides(axes: Axes) -> None:
    """Hide the frame of the axes at the top and at the right, where there are no numbers."""
    axes.spines[["top", "right"]].set_visible(False)
