"""Draw a pipeline schedule: each stage's forward or backward work in each slot, and its idle slots."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from meshwright.description.step.passes.schedule import Cell as Work
from meshwright.description.step.passes.schedule import Schedule, slot_layers
from meshwright.errors import MeshwrightError
from meshwright.pictures.colours import lighter, named
from meshwright.pictures.panels import Cell, Panel, Sketch

MAX_WORK = 200_000
"""The most units of work (microbatches times stages and chunks) that are listed; more would only fill the memory."""

_LETTERS = "abcdefghijklmnopqrstuvwxyz"
_NAMES = {"gpipe": "GPipe", "1f1b": "1F1B in lockstep"}


def pipeline_sketch(schedule: Schedule, num_layers: int | None = None) -> Sketch:
    """Draw time to the right, stages downwards: `F2` is microbatch 2 forward, `B2b` backward in a stage's second chunk.

    num_layers: the layers of the model, to label stages with theirs; None for no labels.
    """
    _check_size(schedule)
    done = {(work.stage, work.slot): work for work in schedule.cells()}
    virtual = f", {schedule.virtual_stages} virtual stages" if schedule.virtual_stages > 1 else ""
    letters = ", a, b, … the chunks of a stage's layers" if schedule.virtual_stages > 1 else ""
    cells = tuple(
        tuple(_cell(done.get((stage, slot)), schedule) for slot in range(2 * schedule.ticks))
        for stage in range(schedule.stages)
    )
    # Slots take the same time, so that they are equally wide.
    width = max(len(cell.text) for row in cells for cell in row)
    panel = Panel(cells=cells, rows=_rows(schedule, num_layers), frame="table", cell_width=width)
    return Sketch(
        title=f"{_NAMES[schedule.kind]}: {schedule.microbatches} microbatches, {schedule.stages} stages{virtual}",
        panels=(panel,),
        notes=(
            f"time to the right; F0 is microbatch 0 forward, B0 its backward{letters}",
            f"idle: {idle_share(schedule):.0%} of all time; {schedule.bubble:.0%} of the time of work, (p - 1) / (v m)",
            f"a device keeps the inputs of at most {schedule.most_kept} of {schedule.units} for backward",
        ),
    )


def pipeline_data(schedule: Schedule, num_layers: int | None = None) -> dict[str, Any]:
    """Return the schedule as data: each unit of work, and the layers of each stage.

    bubble: idle time relative to the time of work. idle_share: idle time relative to all time.
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
    if num_layers is not None:
        data["layers"] = list(slot_layers(num_layers, schedule.stages, schedule.virtual_stages))
    return data


def idle_share(schedule: Schedule) -> float:
    """Return the fraction of all time in which a device waits."""
    return schedule.bubble / (1 + schedule.bubble)


def _check_size(schedule: Schedule) -> None:
    """Raise if a schedule is too long to list."""
    if (work := schedule.units * schedule.stages) > MAX_WORK:
        raise MeshwrightError(
            f"{schedule.stages} stages x {schedule.units:,} units of work are {work:,}, too many to draw; the most is"
            f" {MAX_WORK:,}"
        )


def _rows(schedule: Schedule, num_layers: int | None) -> tuple[str, ...]:
    """Return the name of each stage with its layers, chunk by chunk: `stage 1 (2-3, 6)`."""
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
    """Return the layers of a chunk: `4-7`. Empty slots are last."""
    first, last = layers[0], max(layer for layer in layers if layer is not None)
    return f"{first}" if first == last else f"{first}-{last}"


def _cell(work: Work | None, schedule: Schedule) -> Cell:
    """Return one slot of one stage, in the colour of its phase, paler for later chunks."""
    if work is None:
        return Cell("·", hint="waits")
    chunk, letter = "", ""
    if schedule.virtual_stages > 1:
        chunk, letter = f" in chunk {work.chunk}", _LETTERS[work.chunk % len(_LETTERS)]
    return Cell(
        f"{work.phase[0].upper()}{work.microbatch}{letter}",
        lighter(named(work.phase), 0.7 * work.chunk / schedule.virtual_stages),
        hint=f"microbatch {work.microbatch} {work.phase}{chunk}",
    )
