"""A simulated step as a trace for Perfetto (ui.perfetto.dev) and chrome://tracing.

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

from meshwright.proof.simulate.events import COMPUTE, Event
from meshwright.proof.simulate.schedule import Schedule
from meshwright.support.files import write_file

MAX_EVENTS = 50_000
"""Default limit of slices in a trace: what a browser loads at once."""

_PROCESS = 1
_NANOSECONDS = 1e9


def trace(schedule: Schedule, *, max_events: int = MAX_EVENTS) -> dict[str, Any]:
    """Return a simulated step as trace events: a lane for ops, one for the network of each set of axes, one for copies.

    Waits are slices among the ops. Loops are unrolled. Where that exceeds `max_events` slices, only the first
    iterations of each loop are shown, as many as fit; the slice of the whole loop then names the trip count.
    """
    # As many iterations of each loop as fit within `max_events` slices, at least one.
    longest = max((repeat.count for event in schedule.events for repeat in event.repeats), default=1)
    shown, high = 1, longest
    while shown < high:
        middle = (shown + high + 1) // 2
        fits = sum(_num_slices(event, middle) for event in schedule.events) <= max_events
        shown, high = (middle, high) if fits else (shown, middle - 1)
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


def write_trace(schedule: Schedule, path: str | Path) -> None:
    """Write the trace to a file, gzipped if its name ends in .gz; Perfetto opens both."""
    text = json.dumps(trace(schedule))
    write_file(path, gzip.compress(text.encode()) if str(path).endswith(".gz") else text)


def _num_slices(event: Event, shown: int) -> int:
    """Return the number of an event's slices: one per execution in the first `shown` iterations of each loop around it.

    An event that ops wait for has as many slices again, for the waits.
    """
    runs = math.prod(min(repeat.count, shown) for repeat in event.repeats)
    return runs * (2 if event.exposed_seconds else 1)


def _slices(event: Event, shown: int, lanes: dict[str, int]) -> Iterator[dict[str, Any]]:
    """Yield the slices of an event and of the waits for it, in the first `shown` iterations of each loop around it.

    lanes: the number of each lane, by name.
    """
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
    for trips in product(*(range(min(repeat.count, shown)) for repeat in event.repeats)):
        passed = sum(trip * repeat.period_seconds for trip, repeat in zip(trips, event.repeats, strict=True))
        start = event.start_seconds + passed
        end = start + event.seconds
        yield _slice(name, event.kind, start, end, lanes[event.lane], arguments)
        if event.exposed_seconds:
            yield _slice(f"waits for {event.name}", "wait", end - event.exposed_seconds, end, lanes[COMPUTE], arguments)


def _slice(name: str, kind: str, start: float, end: float, lane: int, arguments: dict[str, Any]) -> dict[str, Any]:
    """Return one complete event; both ends are rounded to nanoseconds, so that neighbours touch and nesting holds."""
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
    """Yield the metadata events that name the process and its lanes, and order the lanes.

    lanes: the number of each lane, by name.
    """
    yield {"name": "process_name", "ph": "M", "pid": _PROCESS, "tid": 0, "args": {"name": "one device, simulated"}}
    for lane, number in lanes.items():
        yield {"name": "thread_name", "ph": "M", "pid": _PROCESS, "tid": number, "args": {"name": lane}}
        yield {"name": "thread_sort_index", "ph": "M", "pid": _PROCESS, "tid": number, "args": {"sort_index": number}}
