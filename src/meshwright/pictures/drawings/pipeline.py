"""Draw a pipeline schedule: the forward or backward work of each stage over time, and its idle time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import accumulate
from typing import Any, NamedTuple

from meshwright.description.step.passes.schedule import Cell as Work
from meshwright.description.step.passes.schedule import Pass, Schedule, slot_layers
from meshwright.errors import MeshwrightError
from meshwright.pictures.colours import device_fill, lighter, named
from meshwright.pictures.panels import Cell, Panel, Sketch
from meshwright.units import show_percent

MAX_WORK = 200_000
"""The largest number of units of work (microbatches times stages and chunks) that are drawn, to limit memory."""

LENGTHS: dict[Pass, int] = {"forward": 1, "backward": 2}
"""The time of each pass of a stage, relative to forward: backward has two matmuls for each one of forward."""

_LETTERS = "abcdefghijklmnopqrstuvwxyz"
_NAMES = {"gpipe": "GPipe", "1f1b": "1F1B in lockstep, as meshwright runs it"}


def pipeline_sketch(schedule: Schedule, num_layers: int | None = None) -> Sketch:
    """Draw a schedule: a row for each stage, time to the right.

    `F2` is the forward of microbatch 2, `B2b` its backward in a stage's second chunk of layers. num_layers: the model's
    number of layers, to label each stage with its layers.
    """
    _check_size(schedule)
    works = list(schedule.cells())
    phases: dict[int, Pass] = {work.slot: work.phase for work in works}
    lengths = [LENGTHS[phases[slot]] for slot in range(2 * schedule.ticks)]
    starts = list(accumulate(lengths, initial=0))
    virtual = f", {schedule.virtual_stages} virtual stages" if schedule.virtual_stages > 1 else ""
    letters = ", a, b, … the chunks of a stage's layers" if schedule.virtual_stages > 1 else ""
    panel = _lanes(schedule, [Timed(work, starts[work.slot]) for work in works], _rows(schedule, num_layers))
    return Sketch(
        title=f"{_NAMES[schedule.kind]}: {schedule.microbatches} microbatches, {schedule.stages} stages{virtual}",
        panels=(panel,),
        notes=(
            f"time to the right; F0 is microbatch 0 forward, B0 its backward, which takes twice as long{letters}",
            *_bubble_notes(schedule),
            *_kept_notes(schedule),
        ),
    )


def textbook_sketch(schedule: Schedule, num_layers: int | None = None) -> Sketch:
    """Draw 1F1B as published, without lockstep: each stage begins as soon as its input arrives."""
    works = textbook_cells(schedule)
    end = max(work.start + LENGTHS[work.work.phase] for work in works)
    return Sketch(
        title=f"1F1B as published: {schedule.microbatches} microbatches, {schedule.stages} stages",
        panels=(_lanes(schedule, works, _rows(schedule, num_layers)),),
        notes=(
            "each stage begins as soon as its input is there, and prefers a backward to another forward"
            " (arXiv:2104.04473)",
            f"as long as in lockstep: (m + p - 1) (1 + 2) = {end} times a forward",
        ),
    )


class Timed(NamedTuple):
    """A unit of work of a stage. start: in units of the time of one forward."""

    work: Work
    start: int


def textbook_cells(schedule: Schedule) -> list[Timed]:
    """Return the work of every stage of 1F1B without lockstep and without chunks, by stage and time.

    Stage s runs p - s - 1 forwards, then alternates between a forward and a backward, then runs the remaining
    backwards. A forward waits for the previous stage's forward, a backward for the next stage's backward.
    """
    p, m = schedule.stages, schedule.microbatches
    ends: dict[tuple[int, int, Pass], int] = {}
    found: list[Timed] = []
    orders = [_order(min(m, p - stage - 1), m) for stage in range(p)]
    clocks = [0] * p
    while any(orders):
        for stage, order in enumerate(orders):
            while order:
                phase, microbatch = order[0]
                neighbour = stage - 1 if phase == "forward" else stage + 1
                is_first = not 0 <= neighbour < p
                if not is_first and (neighbour, microbatch, phase) not in ends:
                    break
                ready = 0 if is_first else ends[neighbour, microbatch, phase]
                start = max(clocks[stage], ready)
                clocks[stage] = ends[stage, microbatch, phase] = start + LENGTHS[phase]
                found.append(Timed(Work(start, stage, microbatch, 0, phase), start))
                order.pop(0)
    return sorted(found, key=lambda one: (one.work.stage, one.start))


def _order(warm_up: int, microbatches: int) -> list[tuple[Pass, int]]:
    """Return (pass, microbatch) of one stage of 1F1B in order; warm_up: forwards before the alternation."""
    forward: list[tuple[Pass, int]] = [("forward", microbatch) for microbatch in range(microbatches)]
    backward: list[tuple[Pass, int]] = [("backward", microbatch) for microbatch in range(microbatches)]
    pairs = [one for pair in zip(forward[warm_up:], backward, strict=False) for one in pair]
    return forward[:warm_up] + pairs + backward[microbatches - warm_up :]


def pipeline_data(schedule: Schedule, num_layers: int | None = None) -> dict[str, Any]:
    """Return a schedule as plain data.

    `cells` are the units of work, `layers` the model's layers, stage by stage and chunk by chunk (None: no layer).
    `bubble` is idle time divided by working time, `idle_share` divided by total time. `kept` is the number of inputs
    that a device keeps for backward. `as_published` is 1F1B without lockstep, with the start and end of each unit; a
    forward takes 1, a backward 2.
    """
    _check_size(schedule)
    data: dict[str, Any] = {
        "schedule": asdict(schedule),
        "ticks": schedule.ticks,
        "bubble": schedule.bubble,
        "idle_share": idle_share(schedule),
        "kept": schedule.most_kept,
        "cells": [cell._asdict() for cell in schedule.cells()],
    }
    if has_textbook(schedule):
        data["as_published"] = [
            {**one.work._asdict(), "start": one.start, "end": one.start + LENGTHS[one.work.phase]}
            for one in textbook_cells(schedule)
        ]
        for cell in data["as_published"]:
            del cell["slot"]
    if num_layers is not None:
        data["layers"] = list(slot_layers(num_layers, schedule.stages, schedule.virtual_stages))
    return data


def has_textbook(schedule: Schedule) -> bool:
    """Whether the schedule is 1F1B without virtual stages, which `textbook_sketch` can draw."""
    return schedule.kind == "1f1b" and schedule.virtual_stages == 1


def idle_share(schedule: Schedule) -> float:
    """Return the fraction of total time in which a device is idle."""
    return schedule.bubble / (1 + schedule.bubble)


def _bubble_notes(schedule: Schedule) -> tuple[str, ...]:
    """Return notes on the fraction of time in which a device works and on the bubble, with their formulas."""
    m, p, v = schedule.microbatches, schedule.stages, schedule.virtual_stages
    works, bubble = show_percent(1 - idle_share(schedule)), show_percent(idle_share(schedule))
    formula, numbers, waits = "m / (m + p - 1)", f"{m} / ({m} + {p} - 1)", "(p - 1) / m"
    if v > 1:
        formula, numbers, waits = "m / (m + (p - 1) / v)", f"{m} / ({m} + {p - 1} / {v})", "(p - 1) / (v m)"
    return (
        f"work: {formula} = {numbers} = {works} of all time; the bubble is the other {bubble}",
        f"the same bubble is {waits} = {show_percent(schedule.bubble)} of the time of work",
    )


def _kept_notes(schedule: Schedule) -> Iterator[str]:
    """Yield notes on the number of inputs that a device keeps for backward, compared with GPipe, which keeps all."""
    most, waiting = schedule.most_kept, min(schedule.units, schedule.age(0, 0) + 1)
    kept = f"a device keeps the inputs of at most {most} of {schedule.units} for backward"
    yield kept if schedule.kind == "gpipe" else f"{kept}; GPipe, which takes as long, of all"
    if schedule.is_balanced and waiting > most:
        last, lent = schedule.stages - 1, waiting - most
        yield f"of {waiting} inputs that wait for stage 0's backward, stage {last} stores {lent}"


def _check_size(schedule: Schedule) -> None:
    """Raise if a schedule is too long to list."""
    if (work := schedule.units * schedule.stages) > MAX_WORK:
        raise MeshwrightError(
            f"{schedule.stages} stages x {schedule.units:,} units of work are {work:,}, too many to draw; the most is"
            f" {MAX_WORK:,}"
        )


def _rows(schedule: Schedule, num_layers: int | None) -> tuple[str, ...]:
    """Return the label of each stage: its name, and the layers of each of its chunks, as in `stage 1 (2-3, 6)`."""
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
    """Return the layers of a chunk as text: `4-7`. None is an empty slot at the end."""
    first, last = layers[0], max(layer for layer in layers if layer is not None)
    return f"{first}" if first == last else f"{first}-{last}"


def _lanes(schedule: Schedule, works: Sequence[Timed], rows: tuple[str, ...]) -> Panel:
    """Draw work over time: a row for each stage, a column for each unit of time.

    rows: the labels of the stages, which have the stages' colours.
    """
    num_columns = max(one.start + LENGTHS[one.work.phase] for one in works)
    lanes = [[Cell("·", hint="waits")] * num_columns for _ in range(schedule.stages)]
    for work, start in works:
        first, *more = _cells(work, schedule)
        lanes[work.stage][start : start + 1 + len(more)] = [first, *more]
    # All columns have this width, so that equal times are equally wide.
    width = max(len(cell.text) for lane in lanes for cell in lane if cell.span == 1)
    fills = tuple(device_fill({"pp": stage}, {"pp": schedule.stages}) for stage in range(schedule.stages))
    return Panel(cells=tuple(map(tuple, lanes)), rows=rows, row_fills=fills, frame="table", cell_width=width)


def _cells(work: Work, schedule: Schedule) -> list[Cell]:
    """Return the cells of one unit of work, one per unit of time, in the colour of its pass; later chunks are paler."""
    chunk, letter = "", ""
    if schedule.virtual_stages > 1:
        chunk, letter = f" in chunk {work.chunk}", _LETTERS[work.chunk % len(_LETTERS)]
    colour = lighter(named(work.phase), 0.7 * work.chunk / schedule.virtual_stages)
    hint, length = f"microbatch {work.microbatch} {work.phase}{chunk}", LENGTHS[work.phase]
    text = f"{work.phase[0].upper()}{work.microbatch}{letter}" + (" ──" if length > 1 else "")
    return [Cell(text, colour, hint, span=length), *[Cell("──", colour, hint, span=0)] * (length - 1)]
