"""The text of a plan of a JAX function: its mesh, the sharded dims, and the layouts that were compared.

A class of dims is a set of dims, over all arrays of the function, that a mesh axis splits together or not at all. A
layout is a mesh together with the classes that each of its axes splits.
"""

from __future__ import annotations

import io
from contextlib import redirect_stdout
from dataclasses import replace
from typing import TYPE_CHECKING

from meshwright.pictures.tables import Lines, collective_table, console, show, table
from meshwright.pictures.text import folded
from meshwright.record import merge
from meshwright.units import show_bytes, show_seconds

if TYPE_CHECKING:
    from meshwright.proof.program_plans.plan import Candidate, ProgramPlan

MOST_SHOWN = 8
"""The number of layouts in the table of layouts, unless more were compiled."""


def plan_text(plan: ProgramPlan) -> str:
    """Return what `print_plan` prints, as plain text."""
    with redirect_stdout(io.StringIO()) as out:
        print_plan(plan)
    return out.getvalue().rstrip()


def print_plan(plan: ProgramPlan) -> None:
    """Print the chosen mesh, the classes of dims that it splits, the collectives, and the compared layouts."""
    count = sum(one.compiled is not None or bool(one.wrong) for one in plan.candidates)
    print(f"{plan.name} on {plan.system} · {plan.num_layouts} layouts predicted, {count} compiled\n")
    best = plan.best
    step = _seconds(best.seconds, "compiled") or _seconds(plan.predicted.step_seconds, "predicted")
    print(f"  {_mesh(best)}   step {step}   {_memory(best)} a device\n")
    rows = []
    for one in sorted(plan.classes, key=lambda one: one.atom not in plan.layout.table):
        axes = "*".join(plan.layout.table.get(one.atom, ())) or "–"
        of = f"not split: {one.barred}" if one.barred else one.first_members
        rows.append([one.name, f"{one.size:,}", axes, of])
    if plan.store:
        rows.append(["state between steps", "", "*".join(plan.store), "each leaf along its largest dim"])
    show(console(), table(["dims", "size", "split over", "of"], rows, left=(0, 2, 3), folds=-1))
    print()
    record = best.compiled or plan.predicted
    show(console(), collective_table(replace(record, collectives=merge(record.collectives))))
    print()
    show(console(), _candidate_table(plan))
    for note in plan.notes:
        print(folded(f"note: {note}"))


def _candidate_table(plan: ProgramPlan) -> Lines:
    """Return a table of the compared layouts: predicted and compiled step, and memory."""
    compiled = [one for one in plan.candidates if one.compiled is not None or one.wrong]
    rest = [one for one in plan.candidates if one not in compiled]
    shown = [*compiled, *rest[: max(0, MOST_SHOWN - len(compiled))]]
    rows = [
        [
            _mesh(one),
            _splits(plan, one),
            _seconds(one.predicted.step_seconds) if one.predicted else "",
            _seconds(one.seconds),
            _memory(one) + ("" if one.fits else ", does not fit"),
        ]
        for one in shown
    ]
    return table(["mesh", "splits", "predicted", "compiled", "memory"], rows, left=(0, 1), folds=1)


def _splits(plan: ProgramPlan, one: Candidate) -> str:
    """Return the classes of dims that each mesh axis of a layout splits: `fsdp: batch and the state; tp: mlp`.

    If one axis splits several classes and an array has dims of more than one of them, only the dims of the first of
    these classes are split in this array.
    """
    if one.layout is None:
        return "as its arguments are"
    parts = []
    named = {each.atom: each.name for each in plan.classes}
    for axis in one.layout.axes:
        names = [named[atom] for atom in axis.atoms if atom in named]
        if axis.degree > 1:
            parts.append(f"{axis.name}: {', '.join(names)}" + (" and the state" if axis.is_stored else ""))
    return "; ".join(parts)


def _mesh(one: Candidate) -> str:
    if one.layout is None:
        return "as given"
    return ",".join(f"{axis.name}={axis.degree}" for axis in one.layout.axes if axis.degree > 1) or "1 device"


def _memory(one: Candidate) -> str:
    known = one.compiled or one.predicted
    return show_bytes(known.memory_bytes["peak"]) if known else ""


def _seconds(seconds: float | None, word: str = "") -> str:
    return "" if seconds is None else f"{show_seconds(seconds)} {word}".rstrip()
