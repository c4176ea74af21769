"""Curves over the steps of several runs, as SVG for a page."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from html import escape

from meshwright.pictures.colours import RULE

RUN_COLOURS = ("#3f7fc1", "#cf7a2f", "#3f9d68", "#ab5fb3", "#b39530", "#c8544f", "#4aa3ad", "#8a7fd1")
"""Colours of runs in order; distinct on white and on black."""

MOST_POINTS = 300
"""The most points of a curve; of a longer run, each point is the mean of several steps."""

WIDTH, HEIGHT = 500, 190
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 12, 10, 26
_SIZE = 12

Points = Sequence[tuple[float, float]]
"""(step, value), in the order of steps."""


def curves(series: Mapping[str, tuple[str, Points]], show: Callable[[float], str], *, title: str) -> str:
    """Return a line chart of several series as SVG; '' if no series has a point.

    Args:
        series: (colour, points) by name.
        show: formats a value of the vertical axis.
        title: a description for readers who cannot see the chart.
    """
    drawn = {name: (colour, thinned(points)) for name, (colour, points) in series.items() if points}
    values = [value for _, points in drawn.values() for _, value in points]
    steps = [step for _, points in drawn.values() for step, _ in points]
    if not values:
        return ""
    x_ticks, y_ticks = ticks(min(steps), max(steps), 6), ticks(min(values), max(values), 5)
    left, right = min(steps), max(max(steps), min(steps) + 1)
    low, high = min(y_ticks[0], min(values)), max(y_ticks[-1], max(values))

    def place(step: float, value: float) -> tuple[float, float]:
        x = _LEFT + (step - left) / (right - left) * (WIDTH - _LEFT - _RIGHT)
        return x, HEIGHT - _BOTTOM - (value - low) / ((high - low) or 1.0) * (HEIGHT - _TOP - _BOTTOM)

    parts = [f"<title>{escape(title)}</title>"]
    for tick in y_ticks:
        _, y = place(left, tick)
        parts.append(
            f'<line x1="{_LEFT}" y1="{y:.1f}" x2="{WIDTH - _RIGHT}" y2="{y:.1f}" stroke="{RULE}" stroke-opacity="0.3"/>'
            f'<text x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{escape(show(tick))}</text>'
        )
    for tick in x_ticks:
        x, _ = place(tick, low)
        if left <= tick <= right:
            parts.append(f'<text x="{x:.1f}" y="{HEIGHT - 6}" text-anchor="middle">{tick:,.0f}</text>')
    for name, (colour, points) in drawn.items():
        placed = [place(step, value) for step, value in points]
        if len(placed) == 1:
            [(x, y)] = placed
            tag, shape = "circle", f'cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"'
        else:
            line = " ".join(f"{x:.1f},{y:.1f}" for x, y in placed)
            stroke = f'stroke="{colour}" stroke-width="1.8" stroke-linejoin="round"'
            tag, shape = "polyline", f'points="{line}" fill="none" {stroke}'
        parts.append(f"<{tag} {shape}><title>{escape(name)}: {escape(show(points[-1][1]))} at the end</title></{tag}>")
    return (
        f'<svg role="img" width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}"'
        f' font-family="system-ui, sans-serif" font-size="{_SIZE}">{"".join(parts)}</svg>'
    )


def thinned(points: Points) -> Points:
    """Return at most `MOST_POINTS` points: means over consecutive points, each at the step of its last point."""
    size = math.ceil(len(points) / MOST_POINTS)
    if size <= 1:
        return points
    groups = [points[start : start + size] for start in range(0, len(points), size)]
    return [(group[-1][0], sum(value for _, value in group) / len(group)) for group in groups]


def ticks(low: float, high: float, count: int) -> list[float]:
    """Return about `count` round numbers from below `low` to above `high`."""
    if not high > low:
        return [low]
    exact = (high - low) / count
    power = 10.0 ** math.floor(math.log10(exact))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= exact)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [number * step for number in range(first, last + 1)]
