"""The simulated step as a drawing: a lane for ops, one for each set of links, exposed time in red."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from html import escape
from itertools import islice, product

from meshwright.record import PHASES
from meshwright.simulate import Event, Schedule
from meshwright.units import show_percent, show_seconds
from meshwright.viz.document import Section

_WIDTH, _LABEL, _ROW, _BAR = 1000, 150, 26, 18
_MOST_RUNS = 2_000
"""Executions of one event that are drawn; of a longer loop only its first iterations are shown."""

_COLOURS = {"forward": "#8fb8de", "recompute": "#d9c46c", "backward": "#9ccb9a", "update": "#c3a6d8"}
_EXPOSED = "#c0392b"


@dataclass(frozen=True)
class Block:
    """A stretch of one lane, in drawing units: one execution of an event, or several too narrow to tell apart."""

    start: float
    end: float
    phase: str
    is_exposed: bool
    hint: str
    runs: int = 1


def timeline_section(schedule: Schedule | None) -> Section:
    """The timeline of a step and its breakdown; empty without a schedule."""
    title = "Timeline of the step, as simulated"
    if schedule is None or not schedule.events or not schedule.step_seconds:
        return Section(title, "")
    end = max(stop for event in schedule.events for _, stop in _runs(event)) or 1.0
    scale = (_WIDTH - _LABEL - 10) / end
    lanes = dict.fromkeys(event.lane for event in schedule.events)
    drawn = []
    for number, lane in enumerate(lanes):
        y = number * _ROW
        drawn.append(f'<text x="0" y="{y + 14}">{escape(lane)}</text>')
        events = [event for event in schedule.events if event.lane == lane and event.kind != "loop"]
        drawn += [_rectangle(block, y) for block in _merge_narrow(_blocks(events, scale))]
    height = len(lanes) * _ROW
    drawn += [*_ticks(end, scale, height), *_legend(height + 40)]
    picture = f'<svg viewBox="0 0 {_WIDTH} {height + 50}" role="img">\n' + "\n".join(drawn) + "\n</svg>"
    return Section(title, f"{picture}\n<p>{escape(_breakdown_text(schedule))}</p>")


def _breakdown_text(schedule: Schedule) -> str:
    parts = ", ".join(
        f"{name} {show_seconds(seconds)} ({show_percent(seconds / schedule.step_seconds)})"
        for name, seconds in schedule.breakdown_seconds.items()
        if seconds
    )
    return f"step {show_seconds(schedule.step_seconds)}: {parts}"


def _runs(event: Event) -> Iterator[tuple[float, float]]:
    """Start and end of each execution of an event in its loops."""
    trips = product(*(range(repeat.count) for repeat in event.repeats))
    for trip in islice(trips, _MOST_RUNS):
        later = sum(number * repeat.period_seconds for number, repeat in zip(trip, event.repeats, strict=True))
        start = event.start_seconds + later
        yield start, start + event.seconds


def _blocks(events: Sequence[Event], scale: float) -> list[Block]:
    """Every execution of some events, in order of their start."""
    blocks = []
    for event in events:
        waits = f", {show_seconds(event.exposed_seconds)} of it waited for" if event.exposed_seconds else ""
        hint = " ".join(filter(None, (event.name, f"({event.scope})" if event.scope else "", event.source)))
        hint = f"{hint}: {show_seconds(event.seconds)}{waits}, {event.phase}, {event.count} times a step"
        for start, stop in _runs(event):
            is_exposed = event.exposed_seconds > 0
            blocks.append(Block(_LABEL + start * scale, _LABEL + stop * scale, event.phase, is_exposed, hint))
    return sorted(blocks, key=lambda block: block.start)


def _merge_narrow(blocks: Sequence[Block]) -> list[Block]:
    """Merge neighbouring equal blocks that are too narrow to see."""
    merged: list[Block] = []
    for block in blocks:
        last = merged[-1] if merged else None
        alike = last is not None and (last.phase, last.is_exposed) == (block.phase, block.is_exposed)
        narrow = last is not None and block.start - last.end < 0.3 and min(block.end - block.start, 1.0) < 0.5
        if last is not None and alike and narrow:
            runs = last.runs + 1
            merged[-1] = replace(last, end=max(last.end, block.end), runs=runs, hint=f"{runs} runs, {block.phase}")
        else:
            merged.append(block)
    return merged


def _rectangle(block: Block, y: float) -> str:
    line = f' stroke="{_EXPOSED}" stroke-width="1.5"' if block.is_exposed else ""
    return (
        f'<rect x="{block.start:.2f}" y="{y}" width="{max(block.end - block.start, 0.3):.2f}" height="{_BAR}"'
        f' fill="{_COLOURS[block.phase]}"{line}><title>{escape(block.hint)}</title></rect>'
    )


def _ticks(end: float, scale: float, height: float) -> list[str]:
    """Times at the start, the middle and the end."""
    drawn = []
    for share, anchor in ((0.0, "start"), (0.5, "middle"), (1.0, "end")):
        x = _LABEL + share * end * scale
        drawn.append(f'<text x="{x:.1f}" y="{height + 14}" text-anchor="{anchor}">{show_seconds(share * end)}</text>')
    return drawn


def _legend(y: float) -> list[str]:
    drawn, x = [], 0.0
    for name in (*PHASES, "waited for"):
        colour = _COLOURS.get(name, "#ffffff")
        edge = _EXPOSED if name == "waited for" else "#888"
        drawn.append(f'<rect x="{x:.1f}" y="{y - 10}" width="11" height="11" fill="{colour}" stroke="{edge}"/>')
        drawn.append(f'<text x="{x + 16:.1f}" y="{y}">{name}</text>')
        x += 40 + 7 * len(name)
    return drawn
