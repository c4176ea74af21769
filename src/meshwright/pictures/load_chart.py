"""The chart of a server under several loads: measured and predicted latency over throughput."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from meshwright.pictures.charts import ON_WHITE, check_chart_file, hide_empty_sides, new_figure, save_figure
from meshwright.pictures.colours import INK, RULE
from meshwright.pictures.curves import RUN_COLOURS
from meshwright.units import show_seconds

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis

STYLES = {"p50": "o-", "p90": "s--", "p99": "^:"}
"""Marks and lines of the percentiles."""


class LoadPoint(NamedTuple):
    """The measurements under one load.

    label: names the load. tokens_per_second: output tokens. latencies: seconds by measure (`ttft`, `tpot`) and
    percentile (`p50`).
    """

    label: str
    tokens_per_second: float
    latencies: dict[str, dict[str, float]]


def write_load_chart(
    points: Sequence[LoadPoint], predicted: Sequence[tuple[float, float]], path: Path, *, title: str
) -> None:
    """Write a chart of time to the first token and of time per output token, over output tokens per second, to a file.

    Args:
        points: the measured loads.
        predicted: a plan's frontier as (step seconds, tokens per second); empty without a plan.
        path: the chart's file; its suffix sets the format.
        title: the chart's title.
    """
    check_chart_file(path)
    figure = new_figure(12, 5, title)
    first, each = figure.subplots(1, 2)
    _draw(first, points, "ttft", "time to the first token")
    if any("ttft" in point.latencies for point in points):
        first.set_xscale("log")
        _mark(first.xaxis, _show_rate)
    first.yaxis.set_major_formatter(_show_seconds)
    first.set_ylim(bottom=0)
    if predicted:
        seconds, rates = zip(*predicted, strict=True)
        each.plot(rates, seconds, "D-", color=RULE, label="predicted, a step")
    _draw(each, points, "tpot", "time per token")
    if predicted or any("tpot" in point.latencies for point in points):
        # The batches of a frontier, and so its rates, span several powers of ten.
        each.loglog()
        _mark(each.xaxis, _show_rate)
        _mark(each.yaxis, _show_seconds)
    save_figure(figure, path)


def _mark(axis: Axis, show: Callable[[float, float], str]) -> None:
    """Put numbers at 1, 2 and 5 of each power of ten of a logarithmic axis."""
    from matplotlib.ticker import LogLocator, NullLocator

    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(show)


def _show_rate(rate: float, _: float) -> str:
    return f"{rate:,.0f}"


def _show_seconds(seconds: float, _: float) -> str:
    return show_seconds(seconds)


def _draw(axes: Axes, points: Sequence[LoadPoint], measure: str, name: str) -> None:
    """Draw the percentiles of a measure (`ttft` or `tpot`) over throughput, with a labelled point for each load."""
    with_it = [point for point in points if measure in point.latencies]
    rates = [point.tokens_per_second for point in with_it]
    for (percentile, style), colour in zip(STYLES.items(), RUN_COLOURS, strict=False):
        seconds = [point.latencies[measure][percentile] for point in with_it]
        axes.plot(rates, seconds, style, color=colour, label=percentile)
    for point, rate in zip(with_it, rates, strict=True):
        place = (rate, point.latencies[measure]["p99"])
        axes.annotate(point.label, place, (0, 8), textcoords="offset points", ha="center", color=INK, bbox=ON_WHITE)
    axes.set_title(name, fontsize="medium", loc="left")
    axes.set_xlabel("output tokens a second")
    axes.margins(0.15)
    axes.legend(frameon=False)
    hide_empty_sides(axes)
