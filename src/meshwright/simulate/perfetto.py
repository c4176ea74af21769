"""A simulated run as a trace that Perfetto (ui.perfetto.dev) and chrome://tracing open.

The format: Trace Event Format, docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU.
"""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

from meshwright.simulate.events import COMPUTE, Event
from meshwright.simulate.schedule import Schedule

MOST_EVENTS = 50_000
"""Slices that a trace shows if nothing else is said: what a browser takes in a moment."""

_PROCESS = 1
_NANOSECONDS = 1e9


def trace(schedule: Schedule, *, most_events: int = MOST_EVENTS) -> dict[str, Any]:
    """A simulated run as trace events: a lane for the ops, one for the network of each mesh axis, one for copies.

    What ops wait for is a slice of its own among them. Loops are unrolled; where that would make more slices than
    `most_events`, only as many of the first trips of each as fit, and the slice of the loop says how many it has.
    """
    shown = _trips_shown(schedule, most_events)
    lanes = dict.fromkeys((COMPUTE, *sorted({event.lane for event in schedule.events})))
    numbers = {lane: number for number, lane in enumerate(lanes, 1)}
    slices = [one for event in schedule.events for one in _slices(event, shown, numbers)]
    # A slice goes before those it encloses, which begin with it or after it.
    slices.sort(key=lambda one: (one["ts"], -one["dur"]))
    return {
        "traceEvents": [*_names(numbers), *slices],
        "displayTimeUnit": "ms",
        "otherData": {
            "step_seconds": schedule.step_seconds,
            "breakdown_seconds": dict(schedule.breakdown_seconds),
            "trips_shown": shown,
            "notes": list(schedule.notes),
        },
    }


def write_trace(schedule: Schedule, path: str | Path, *, most_events: int = MOST_EVENTS) -> None:
    """Write the trace to a file, compressed where its name ends in .gz; both open in Perfetto."""
    text = json.dumps(trace(schedule, most_events=most_events))
    Path(path).write_bytes(gzip.compress(text.encode()) if str(path).endswith(".gz") else text.encode())


def _trips_shown(schedule: Schedule, most_events: int) -> int:
    """The most trips of any one loop that can be shown, at least one."""
    longest = max((repeat.count for event in schedule.events for repeat in event.repeats), default=1)
    low, high = 1, longest
    while low < high:
        middle = (low + high + 1) // 2
        fits = sum(_num_slices(event, middle) for event in schedule.events) <= most_events
        low, high = (middle, high) if fits else (low, middle - 1)
    return low


def _num_slices(event: Event, shown: int) -> int:
    """The slices of an event and of what waits for it, of the first trips of its loops."""
    runs = math.prod(min(repeat.count, shown) for repeat in event.repeats)
    return runs * (2 if event.exposed_seconds else 1)


def _starts(event: Event, shown: int) -> Iterator[float]:
    """When each run of an event begins, of the first trips of its loops."""
    for trips in product(*(range(min(repeat.count, shown)) for repeat in event.repeats)):
        passed = sum(trip * repeat.period_seconds for trip, repeat in zip(trips, event.repeats, strict=True))
        yield event.start_seconds + passed


def _slices(event: Event, shown: int, lanes: dict[str, int]) -> Iterator[dict[str, Any]]:
    """The slices of an event, and those of what ops wait for it."""
    said = {
        "phase": event.phase,
        "scope": event.scope,
        "source": event.source,
        "axes": ",".join(event.axes),
        "bytes": event.num_bytes,
        "times a step": event.count,
        "time from": event.basis,
        "note": event.note,
    }
    arguments = {key: value for key, value in said.items() if value}
    name = f"{event.name}: {event.note}" if event.kind == "loop" else event.name
    for start in _starts(event, shown):
        end = start + event.seconds
        yield _slice(name, event.kind, start, end, lanes[event.lane], arguments)
        if event.exposed_seconds:
            yield _slice(f"waits for {event.name}", "wait", end - event.exposed_seconds, end, lanes[COMPUTE], arguments)


def _slice(name: str, kind: str, start: float, end: float, lane: int, arguments: dict[str, Any]) -> dict[str, Any]:
    """One complete event; both ends rounded to nanoseconds, so that neighbours meet and what nests stays inside."""
    begin, finish = (round(seconds * _NANOSECONDS) for seconds in (start, end))
    return {
        "name": name,
        "cat": kind,
        "ph": "X",
        "ts": begin / 1000,
        "dur": (finish - begin) / 1000,
        "pid": _PROCESS,
        "tid": lane,
        "args": arguments,
    }


def _names(lanes: dict[str, int]) -> Iterator[dict[str, Any]]:
    """The names of the process and its lanes, and the order of the lanes."""
    yield {"name": "process_name", "ph": "M", "pid": _PROCESS, "tid": 0, "args": {"name": "one device, simulated"}}
    for lane, number in lanes.items():
        yield {"name": "thread_name", "ph": "M", "pid": _PROCESS, "tid": number, "args": {"name": lane}}
        yield {"name": "thread_sort_index", "ph": "M", "pid": _PROCESS, "tid": number, "args": {"sort_index": number}}
