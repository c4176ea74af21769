"""The simulated step as a drawing: a lane for ops, one for each set of links, exposed time in red."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from html import escape
from itertools import islice, product

from meshwright.record import PHASES
from meshwright.simulate import Event, Schedule
from meshwright.units import show_percent, show_seconds
from meshwright.viz.colours import named
from meshwright.viz.document import WIDTH, Section, drawing
from meshwright.viz.scene import Box, Label, Line, Scene, legend, stack

_MOST_RUNS = 2_000
"""Executions of one event that are drawn; of a longer loop only its first iterations are shown."""

_NARROW = 0.06
"""Characters: neighbours of one phase that are narrower are drawn as one box."""


def timeline_section(schedule: Schedule | None) -> Section:
    """The timeline of a step and its breakdown; empty without a schedule."""
    title = "Timeline of the step, as simulated"
    if schedule is None or not schedule.events or not schedule.step_seconds:
        return Section(title, "")
    end = max(stop for event in schedule.events for _, stop in _runs(event)) or 1.0
    lanes = dict.fromkeys(event.lane for event in schedule.events)
    left = max(map(len, lanes)) + 2
    scale = (WIDTH - left - 1) / end
    items: list[Box | Line | Label] = []
    for y, lane in enumerate(lanes):
        items.append(Label(0, y, lane))
        events = [event for event in schedule.events if event.lane == lane and event.kind != "loop"]
        items += _merge_narrow(_boxes(events, left, y, scale))
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        said, x = show_seconds(share * end), left + share * end * scale
        items += [Line(x, len(lanes), 0, 0.3), Label(min(x - len(said) / 2, WIDTH - len(said)), len(lanes) + 0.2, said)]
    colours = {phase: named(phase) for phase in PHASES}
    drawn = Scene(WIDTH, len(lanes) + 1.4, tuple(items))
    parts = ", ".join(
        f"{name} {show_seconds(seconds)} ({show_percent(seconds / schedule.step_seconds)})"
        for name, seconds in schedule.breakdown_seconds.items()
        if seconds
    )
    said = f"step {show_seconds(schedule.step_seconds)}: {parts}. A red edge: ops wait for it."
    return Section(title, f"{drawing(stack((drawn, legend(colours, WIDTH))))}\n<p>{escape(said)}</p>")


def _runs(event: Event) -> Iterator[tuple[float, float]]:
    """Start and end of each execution of an event in its loops."""
    trips = product(*(range(repeat.count) for repeat in event.repeats))
    for trip in islice(trips, _MOST_RUNS):
        later = sum(number * repeat.period_seconds for number, repeat in zip(trip, event.repeats, strict=True))
        start = event.start_seconds + later
        yield start, start + event.seconds


def _boxes(events: Sequence[Event], left: float, y: float, scale: float) -> list[Box]:
    """Every execution of some events, in order of their start."""
    boxes = []
    for event in events:
        waits = f", {show_seconds(event.exposed_seconds)} of it waited for" if event.exposed_seconds else ""
        hint = " ".join(filter(None, (event.name, f"({event.scope})" if event.scope else "", event.source)))
        hint = f"{hint}: {show_seconds(event.seconds)}{waits}, {event.phase}, {event.count} times a step"
        colour, edge = named(event.phase), "exposed" if event.exposed_seconds else "none"
        for start, stop in _runs(event):
            width = max((stop - start) * scale, 0.04)
            boxes.append(Box(left + start * scale, y + 0.1, width, 0.8, fill=colour, hint=hint, edge=edge))
    return sorted(boxes, key=lambda box: box.x)


def _merge_narrow(boxes: Sequence[Box]) -> list[Box]:
    """Merge neighbouring equal boxes that are too narrow to see."""
    merged: list[Box] = []
    runs = 1
    for box in boxes:
        last = merged[-1] if merged else None
        is_alike = last is not None and (last.fill, last.edge) == (box.fill, box.edge)
        if last is not None and is_alike and box.x - last.x - last.width < _NARROW / 2 and box.width < _NARROW:
            runs += 1
            width = max(last.width, box.x + box.width - last.x)
            merged[-1] = replace(last, width=width, hint=f"{runs} runs, as: {box.hint}")
        else:
            runs = 1
            merged.append(box)
    return merged
