"""A pipeline in time: what each stage does in each slot, forward or backward, and where it waits."""

from __future__ import annotations

from collections.abc import Mapping

from meshwright.cost.pipeline import Cell as Work
from meshwright.cost.pipeline import Schedule
from meshwright.pictures.sketch import Cell, Panel, Sketch

_WIDTH = 90
"""The characters of a row of slots; what takes more goes on below."""

_LETTERS = "abcdefghijklmnopqrstuvwxyz"
_NAMES = {"gpipe": "GPipe", "1f1b": "1F1B in lockstep"}


def pipeline_sketch(schedule: Schedule) -> Sketch:
    """Time across and stages down: `F2` is microbatch 2 forward, `B2b` backward in the second chunk of a stage."""
    done = {(work.stage, work.slot): work for work in schedule.cells()}
    slots = 2 * schedule.ticks
    each = max(1, _WIDTH // (2 + max(len(_text(work, schedule)) for work in done.values())))
    virtual = f", {schedule.virtual_stages} virtual stages" if schedule.virtual_stages > 1 else ""
    return Sketch(
        title=f"{_NAMES[schedule.kind]}: {schedule.microbatches} microbatches, {schedule.stages} stages{virtual}",
        panels=tuple(_panel(schedule, done, range(start, min(start + each, slots))) for start in range(0, slots, each)),
        notes=(
            f"waiting: {schedule.bubble:.0%} of the time of work, (p - 1) / (v m)",
            f"the first stage keeps at most {schedule.most_kept} of {schedule.units} for backward",
        ),
    )


def _panel(schedule: Schedule, done: Mapping[tuple[int, int], Work], slots: range) -> Panel:
    """Some slots of all stages."""
    return Panel(
        cells=tuple(
            tuple(_cell(done.get((stage, slot)), schedule) for slot in slots) for stage in range(schedule.stages)
        ),
        rows=tuple(f"stage {stage}" for stage in range(schedule.stages)),
        frame="open",
    )


def _cell(work: Work | None, schedule: Schedule) -> Cell:
    """One slot of one stage; backward has colours of its own, as has each chunk."""
    if work is None:
        return Cell("·", hint="waits")
    chunk = f" in chunk {work.chunk}" if schedule.virtual_stages > 1 else ""
    return Cell(
        _text(work, schedule),
        2 * work.chunk + (work.phase == "backward"),
        hint=f"microbatch {work.microbatch} {work.phase}{chunk}",
    )


def _text(work: Work, schedule: Schedule) -> str:
    """What a cell says."""
    letter = "F" if work.phase == "forward" else "B"
    chunk = _LETTERS[work.chunk % len(_LETTERS)] if schedule.virtual_stages > 1 else ""
    return f"{letter}{work.microbatch}{chunk}"
