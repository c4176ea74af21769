"""Sections of HTML pages with drawings: memory by term, collectives by mesh axes, timeline of the simulated step."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from itertools import islice, product
from urllib.parse import quote

from meshwright.pictures.charts import NOT_TERMS
from meshwright.pictures.colours import WRONG, named
from meshwright.pictures.document import WIDTH, Section, drawing, html_table, legend
from meshwright.pictures.rows import add_up_equal, buffer_rows, file_name
from meshwright.pictures.scene import Box, Label, Line, Scene
from meshwright.proof.simulate.buffers import Buffer
from meshwright.proof.simulate.events import Event
from meshwright.proof.simulate.schedule import Schedule
from meshwright.record import PHASES, Collective, Record, wire_bytes
from meshwright.units import show_bytes, show_percent, show_seconds

_TRACE = 'The same for ui.perfetto.dev: <a href="{}">{}</a>'

_MOST_RUNS = 2_000
"""The largest number of executions of one event that are drawn: the first ones of its loops."""

_NARROW = 0.06
"""The width in characters below which neighbouring boxes of one colour are merged."""


@dataclass(frozen=True)
class BarSegment:
    """A part of a bar. size: in the unit of the bar. name: determines the colour (`colours.named`). hint: tooltip."""

    size: float
    name: str
    hint: str


def memory_section(records: Mapping[str, Record], usable_bytes: float | None) -> Section:
    """Return a section with a bar for each record: a device's memory by term, or its peak if terms are unknown.

    usable_bytes: the memory that a program can use, shown as a line.
    """
    bars = {}
    for origin, record in records.items():
        peak = record.memory_bytes.get("peak", 0)
        terms = {name: size for name, size in record.memory_bytes.items() if name not in NOT_TERMS and size}
        terms = terms or {"peak": peak}
        bars[f"{origin}  {show_bytes(peak)}"] = [
            BarSegment(size, name, f"{name}: {show_bytes(size)}") for name, size in terms.items() if size
        ]
    largest = max((record.memory_bytes.get("peak", 0) for record in records.values()), default=0)
    body = draw_bars({name: bar for name, bar in bars.items() if bar}, usable_bytes)
    if usable_bytes and body:
        does = "fits" if largest <= usable_bytes else '<span class="wrong">does not fit</span>'
        body += f"<p>{show_bytes(largest)} {does} in the {show_bytes(usable_bytes)} that a program can use</p>"
    return Section("Memory of a device", body)


def buffers_section(buffers: Sequence[Buffer]) -> Section:
    """Return a section with the largest buffers at the peak of memory."""
    columns = ("array", "bytes", "times", "is", "from")
    return Section("Largest buffers at the peak", html_table(columns, buffer_rows(buffers), text=(0, 3, 4)))


def collectives_section(record: Record) -> Section:
    """Return a section with the bytes that a device sends, as bars by kind and axes, and a table of all collectives."""
    degrees = dict(record.mesh)
    bars: dict[str, list[BarSegment]] = {}
    for move in sorted(record.collectives, key=lambda move: (move.axes, move.kind, PHASES.index(move.phase))):
        degree = math.prod(degrees[axis] for axis in move.axes)
        sent = wire_bytes(move.kind, move.bytes, degree) if move.axes else float(move.bytes)
        hint = f"{move.phase}: {show_bytes(sent)} sent a device, {move.count} times"
        bars.setdefault(f"{'*'.join(move.axes) or 'no axes'}  {move.kind}", []).append(
            BarSegment(sent, move.phase, hint)
        )
    rows = [_row(move) for move in add_up_equal(record.collectives)]
    columns = ("collective", "over", "phase", "bytes a device", "times", "seconds", "exposed", "array", "from, note")
    return Section("Collectives by mesh axes", draw_bars(bars, None) + html_table(columns, rows, text=(0, 1, 2, 7, 8)))


def _row(move: Collective) -> tuple[str, ...]:
    """Return the row of a collective in the table of `collectives_section`."""
    times = ["–" if seconds is None else show_seconds(seconds) for seconds in (move.seconds, move.exposed_seconds)]
    said = "; ".join(filter(None, (file_name(move.source), move.remarks)))
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


def draw_bars(bars: Mapping[str, Sequence[BarSegment]], limit: float | None) -> str:
    """Return stacked bars on one scale as HTML, with a legend below and a line at `limit`; '' if all are empty.

    bars: the parts of each bar, by its label.
    """
    longest = max((sum(piece.size for piece in pieces) for pieces in bars.values()), default=0.0)
    if not longest:
        return ""
    # With a limit far above all bars, these would be too short to see.
    shown_limit = limit if limit is not None and limit < 20 * longest else 0.0
    left = max(map(len, bars)) + 2
    scale = (WIDTH - left - 1) / max(longest, shown_limit)
    items: list[Box | Line | Label] = []
    for y, (label, pieces) in enumerate(bars.items()):
        items.append(Label(0, y, label))
        x = float(left)
        for piece in pieces:
            width = piece.size * scale
            items.append(Box(x, y + 0.1, max(width, 0.05), 0.8, fill=named(piece.name), hint=piece.hint))
            x += width
    if shown_limit:
        x, said = left + shown_limit * scale, f"usable {show_bytes(shown_limit)}"
        items += [Line(x, 0, 0, len(bars) + 0.2, WRONG, is_dashed=True)]
        items += [Label(min(x, WIDTH) - len(said), len(bars) + 0.1, said)]
    names = dict.fromkeys(piece.name for pieces in bars.values() for piece in pieces)
    colours = {name: named(name) for name in sorted(names, key=lambda name: name in PHASES and PHASES.index(name))}
    drawn = Scene(WIDTH, len(bars) + (1.1 if shown_limit else 0.2), tuple(items))
    return drawing(drawn) + legend(colours)


def timeline_section(schedule: Schedule | None, trace: str | None = None) -> Section:
    """Return a section with the timeline of the simulated step and its breakdown; empty without a schedule.

    trace: a trace file to link to.
    """
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
    colours = {phase: named(phase) for phase in PHASES if any(event.phase == phase for event in schedule.events)}
    drawn = Scene(WIDTH, len(lanes) + 1.4, tuple(items))
    parts = ", ".join(
        f"{name} {show_seconds(seconds)} ({show_percent(seconds / schedule.step_seconds)})"
        for name, seconds in schedule.breakdown_seconds.items()
        if seconds
    )
    said = f"step {show_seconds(schedule.step_seconds)}: {parts}. A red edge: ops wait for it."
    link = f"<p>{_TRACE.format(escape(quote(trace)), escape(trace))}</p>" if trace else ""
    return Section(title, f"{drawing(drawn)}{legend(colours)}<p>{escape(said)}</p>{link}")


def _runs(event: Event) -> Iterator[tuple[float, float]]:
    """Yield (start, end), in seconds, of each execution of an event in its loops, up to `_MOST_RUNS`."""
    trips = product(*(range(repeat.count) for repeat in event.repeats))
    for trip in islice(trips, _MOST_RUNS):
        later = sum(number * repeat.period_seconds for number, repeat in zip(trip, event.repeats, strict=True))
        start = event.start_seconds + later
        yield start, start + event.seconds


def _boxes(events: Sequence[Event], left: float, y: float, scale: float) -> list[Box]:
    """Return a box for every execution of some events, sorted by start.

    left, y: the position of time 0, in characters and lines. scale: characters per second.
    """
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
    """Return the boxes, with neighbours that are too narrow to see merged if they have one colour and border."""
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
