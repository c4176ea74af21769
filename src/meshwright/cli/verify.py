"""`meshwright verify`: the train step compiled by the compiler that will run it, beside what was planned."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from meshwright.cli.common import Subject, choose_plan
from meshwright.cli.page import check_page
from meshwright.cli.tables import console, folded, headline, show, table
from meshwright.cli.waiting import waiting
from meshwright.errors import MeshwrightError
from meshwright.planner import Plan, as_run
from meshwright.record import Record
from meshwright.units import show_seconds

if TYPE_CHECKING:
    from meshwright.verification import Verification


@dataclass(frozen=True)
class Args:
    """Compile the real train step for a mesh and lay predicted | compiled side by side; no accelerator is needed.

    Example: meshwright verify tiny --on cpu:8 --mesh-dim 2,2,2,1 --batch 16 --seq-len 256
    For a TPU slice: meshwright verify llama3-8b --num-layers 2 --on v5e:4x4 --mesh-dim 1,4,4,1 --batch 16
    With what a run measured: meshwright verify runs/tiny, or meshwright verify plan.yaml --run runs/tiny
    """

    subject: Annotated[Subject, tyro.conf.arg(name="")]
    mesh_dim: str | None = None
    """dp,fsdp,tp,sp as 1,-1,4,1, or names, as fsdp=-1,tp=4. One degree may be -1. Without it, the planner chooses."""
    run: Path | None = None
    """The directory of a run of the same step: what it measured is laid beside."""
    effort: Literal["fast", "default"] = "fast"
    """What the TPU compiler spends: fast for counts and bytes, default for the schedule that will really run."""
    tolerance: float | None = None
    """End with code 1 where a difference is a larger share than this of what was predicted, as 0.1."""
    html: Path | None = None
    """Write the whole of it as one page to look at, with the timeline of the step."""
    json: bool = False
    """Print {"predicted", "compiled", "measured", "rows", "differences"} instead of the table."""


def run(args: Args) -> int:
    """Compile, compare, print; 1 where a difference exceeds the tolerance."""
    plan, measured = _plan_and_measured(args)
    check_page(args.html)
    from meshwright.verification import verify

    with waiting(f"compiling {plan.workload.model.name} on {plan.mesh} for {plan.hardware}"):
        found = verify(plan, effort=args.effort, measured=measured)
    if args.html is not None:
        _write_page(args.html, found, measured)
    if args.json:
        print(json.dumps(_json(found, measured), indent=2))
    else:
        _print(found)
    return int(args.tolerance is not None and any(row.exceeds(args.tolerance) for row in found.rows))


def _plan_and_measured(args: Args) -> tuple[Plan, Record | None]:
    """The plan that the arguments mean, and what a run of it measured, where they name one."""
    named = Path(args.subject.model)
    is_run = (named / "config.json").is_file()
    if is_run:
        return _of_run(named)
    plan = as_run(choose_plan(args.subject, args.mesh_dim))
    if args.run is None:
        return plan, None
    ran, measured = _of_run(args.run)
    for what in ("workload", "mesh", "hardware"):
        if getattr(ran, what) != getattr(plan, what):
            raise MeshwrightError(
                f"{args.run} is a run of another {what}; `meshwright verify {args.run}` is of its own"
            )
    return plan, measured


def _of_run(directory: Path) -> tuple[Plan, Record]:
    """The plan of a run's step, and what it measured."""
    from meshwright.hardware import parse_system
    from meshwright.planner import make_plan
    from meshwright.training import measured, read_config, read_metrics

    config = read_config(directory)
    plan = make_plan(config.workload, config.mesh, parse_system(config.hardware), config.strategy)
    return plan, measured(config, read_metrics(directory))


def _json(found: Verification, measured: Record | None) -> dict[str, Any]:
    """All of it as plain data."""
    records = {"predicted": found.plan.predicted.to_json(), "compiled": found.compiled.to_json()}
    if measured:
        records["measured"] = measured.to_json()
    from meshwright.viz.words import reason

    rows = [row.to_json() | {"reason": reason(row)} for row in found.rows]
    differences = [data for row, data in zip(found.rows, rows, strict=True) if not row.is_equal]
    return records | {"rows": rows, "differences": differences}


def _write_page(path: Path, found: Verification, measured: Record | None) -> None:
    """The page of a verification."""
    from meshwright.viz.document import write_page
    from meshwright.viz.verify_page import verify_page

    write_page(path, verify_page(found, measured))


def _print(found: Verification) -> None:
    """The table, with a column for what was measured where there is anything."""
    from meshwright.viz.words import row_cells

    plan, program, rows = found.plan, found.program, found.rows
    took = f"in {show_seconds(program.compile_seconds)}{' (cached)' if program.cached else ''}"
    print(f"{headline(plan.workload, plan.hardware)}\nmesh {plan.mesh} · compiled by {program.compiler} {took}\n")
    ran = any(row.measured is not None for row in rows)
    columns = ["", "predicted", "compiled", "difference", *(["measured", "difference"] if ran else []), ""]
    show(console(), table(columns, [row_cells(row, with_measured=ran) for row in rows], left=(0, len(columns) - 1)))
    different = sum(not row.is_equal for row in rows)
    print(f"\n {len(rows) - different} of {len(rows)} quantities are equal; {different} differ, each named above")
    for note in dict.fromkeys((*plan.predicted.notes, *found.compiled.notes)):
        print(folded(f"note: {note}"))
