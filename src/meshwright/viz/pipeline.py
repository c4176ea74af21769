"""A pipeline schedule: what each stage does in each slot, forward or backward, and where it is idle."""

from __future__ import annotations

from collections.abc import Mapping

from meshwright.step.schedule import Cell as Work
from meshwright.step.schedule import Schedule, slot_layers
from meshwright.viz.sketch import Cell, Panel, Sketch

_WIDTH = 90
"""Characters of a row of slots; longer schedules continue below."""

_LETTERS = "abcdefghijklmnopqrstuvwxyz"
_NAMES = {"gpipe": "GPipe", "1f1b": "1F1B in lockstep"}


def pipeline_sketch(schedule: Schedule, num_layers: int | None = None) -> Sketch:
    """Time to the right, stages downwards: `F2` is microbatch 2 forward, `B2b` backward in the second chunk of a stage.

    num_layers: of the model, to label stages with their layers.
    """
    done = {(work.stage, work.slot): work for work in schedule.cells()}
    slots, rows = 2 * schedule.ticks, _rows(schedule, num_layers)
    free = _WIDTH - max(map(len, rows)) + len("stage 0")
    each = max(1, free // (2 + max(len(_text(work, schedule)) for work in done.values())))
    virtual = f", {schedule.virtual_stages} virtual stages" if schedule.virtual_stages > 1 else ""
    return Sketch(
        title=f"{_NAMES[schedule.kind]}: {schedule.microbatches} microbatches, {schedule.stages} stages{virtual}",
        panels=tuple(
            _panel(schedule, done, range(start, min(start + each, slots)), rows) for start in range(0, slots, each)
        ),
        notes=(
            f"waiting: {schedule.bubble:.0%} of the time of work, (p - 1) / (v m)",
            f"a device keeps the inputs of at most {schedule.most_kept} of {schedule.units} for backward",
        ),
    )


def _rows(schedule: Schedule, num_layers: int | None) -> tuple[str, ...]:
    """The name of each stage with its layers, chunk by chunk: `stage 1 (2-3, 6)`."""
    if num_layers is None:
        return tuple(f"stage {stage}" for stage in range(schedule.stages))
    layers = slot_layers(num_layers, schedule.stages, schedule.virtual_stages)
    length = len(layers) // (schedule.stages * schedule.virtual_stages)
    chunks = [_span(layers[start : start + length]) for start in range(0, len(layers), length)]
    each = schedule.virtual_stages
    return tuple(
        f"stage {stage} ({', '.join(chunks[each * stage : each * (stage + 1)])})" for stage in range(schedule.stages)
    )


def _span(layers: tuple[int | None, ...]) -> str:
    """The layers of a chunk: `4-7`. Empty slots are last."""
    first, last = layers[0], max(layer for layer in layers if layer is not None)
    return f"{first}" if first == last else f"{first}-{last}"


def _panel(schedule: Schedule, done: Mapping[tuple[int, int], Work], slots: range, rows: tuple[str, ...]) -> Panel:
    """Some slots of all stages."""
    return Panel(
        cells=tuple(
            tuple(_cell(done.get((stage, slot)), schedule) for slot in slots) for stage in range(schedule.stages)
        ),
        rows=rows,
        frame="open",
    )


def _cell(work: Work | None, schedule: Schedule) -> Cell:
    """One slot of one stage; backward and each chunk have colours of their own."""
    if work is None:
        return Cell("·", hint="waits")
    chunk = f" in chunk {work.chunk}" if schedule.virtual_stages > 1 else ""
    return Cell(
        _text(work, schedule),
        2 * work.chunk + (work.phase == "backward"),
        hint=f"microbatch {work.microbatch} {work.phase}{chunk}",
    )


def _text(work: Work, schedule: Schedule) -> str:
    letter = "F" if work.phase == "forward" else "B"
    chunk = _LETTERS[work.chunk % len(_LETTERS)] if schedule.virtual_stages > 1 else ""
    return f"{letter}{work.microbatch}{chunk}"
