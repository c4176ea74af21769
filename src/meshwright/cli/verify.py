"""`meshwright verify`: the train step compiled by the compiler that will run it, beside what was planned."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from meshwright.cli.common import Subject, choose_plan
from meshwright.cli.tables import console, folded, headline, show, table
from meshwright.planner import Plan
from meshwright.record import Record
from meshwright.units import show_bytes, show_flops, show_percent, show_rate, show_seconds

if TYPE_CHECKING:
    from meshwright.compiled import Row, Verification


@dataclass(frozen=True)
class Args:
    """Compile the real train step for a mesh and lay predicted | compiled side by side; no accelerator is needed.

    Example: meshwright verify tiny --on cpu:8 --mesh-dim 2,2,2,1 --batch 16 --seq-len 256
    For a TPU slice: meshwright verify llama3-8b --num-layers 2 --on v5e:4x4 --mesh-dim 1,4,4,1 --batch 16
    With what a run measured: meshwright verify runs/tiny
    """

    subject: Annotated[Subject, tyro.conf.arg(name="")]
    mesh_dim: str | None = None
    """dp,fsdp,tp,sp as 1,-1,4,1, or names, as fsdp=-1,tp=4. One degree may be -1. Without it, the planner chooses."""
    effort: Literal["fast", "default"] = "fast"
    """What the TPU compiler spends: fast for counts and bytes, default for the schedule that will really run."""
    tolerance: float | None = None
    """End with code 1 where a difference is a larger share than this of what was predicted, as 0.1."""
    json: bool = False
    """Print {"predicted", "compiled", "measured", "differences"} instead of the table."""


def run(args: Args) -> int:
    """Compile, compare, print; 1 where a difference exceeds the tolerance."""
    from meshwright.compiled import verify

    plan, measured = _plan_and_measured(args)
    with console(stderr=True).status(f"compiling for {plan.hardware}"):
        found = verify(plan, effort=args.effort)
    if args.json:
        print(json.dumps(_json(plan.predicted, found, measured), indent=2))
    else:
        _print(plan, found, measured)
    return int(args.tolerance is not None and any(row.exceeds(args.tolerance) for row in found.rows))


def _plan_and_measured(args: Args) -> tuple[Plan, Record | None]:
    """The plan that the arguments mean; where they name a run, the plan of that, and what it measured."""
    directory = Path(args.subject.model)
    if not (directory / "metrics.jsonl").is_file():
        return choose_plan(args.subject, args.mesh_dim), None
    from meshwright.hardware import parse_system
    from meshwright.planner import make_plan
    from meshwright.training import measured, read_config, read_metrics

    config = read_config(directory)
    plan = make_plan(config.workload, config.mesh, parse_system(config.hardware))
    return plan, measured(config, read_metrics(directory))


def _json(predicted: Record, found: Verification, measured: Record | None) -> dict[str, Any]:
    """All of it as plain data."""
    records: dict[str, Any] = {"predicted": predicted.to_json(), "compiled": found.compiled.to_json()}
    if measured:
        records["measured"] = measured.to_json()
    return records | {"differences": [row.to_json() for row in found.rows if not row.is_equal]}


def _print(plan: Plan, found: Verification, measured: Record | None) -> None:
    """The table, with a column for what was measured where there is one."""
    program, rows = found.program, found.rows
    took = f"in {show_seconds(program.compile_seconds)}{' (cached)' if program.cached else ''}"
    print(f"{headline(plan.workload, plan.hardware)}\nmesh {plan.mesh} · compiled by {program.compiler} {took}\n")
    columns = ["", "predicted", "compiled", *(["measured"] if measured else []), "difference", ""]
    lines = [_line(row, ["–"] if measured else []) for row in rows]
    lines += _measured_lines(plan.predicted, measured) if measured else []
    show(console(), table(columns, lines, left=(0, len(columns) - 1)))
    different = sum(not row.is_equal for row in rows)
    print(f"\n {len(rows) - different} of {len(rows)} quantities are equal; {different} differ, each named above")
    for note in (*plan.predicted.notes, *found.compiled.notes):
        print(folded(f"note: {note}"))


def _line(row: Row, measured: list[str]) -> list[str]:
    """A row's line."""
    show = show_bytes if row.unit == "B" else show_flops
    both = ["–" if amount is None else show(amount) for amount in (row.predicted, row.compiled)]
    difference = "0" if row.is_equal else "–" if row.relative is None else f"{row.relative:+.1%}"
    return [row.quantity, *both, *measured, difference, row.reason]


def _measured_lines(predicted: Record, measured: Record) -> list[list[str]]:
    """What a compiled program has no clock for: step time, speed and MFU, predicted and measured."""
    quantities = (
        ("step", predicted.step_seconds, measured.step_seconds, show_seconds),
        (
            "tokens a second",
            predicted.tokens_per_second,
            measured.tokens_per_second,
            lambda rate: show_rate(rate, "tok/s"),
        ),
        ("MFU", predicted.mfu, measured.mfu, show_percent),
    )
    return [
        [name, show(plan), "–", show(run), f"{run / plan - 1:+.1%}", ""]
        for name, plan, run, show in quantities
        if plan and run
    ]
