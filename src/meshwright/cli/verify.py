"""`meshwright verify`: the train step compiled by the compiler that will run it, beside what was planned."""

from __future__ import annotations

import json
import shlex
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from meshwright.cli.arguments import Json, Mesh, StrategyArgs, WorkloadArgs, given_options, option, positional
from meshwright.cli.tables import console, headline, show, table
from meshwright.cli.text import folded, next_line
from meshwright.cli.typed import check_all_read
from meshwright.cli.waiting import waiting
from meshwright.errors import MeshwrightError
from meshwright.files import check_output, write_file
from meshwright.planner import Plan, plan_to_run
from meshwright.planner.plan import is_plan_file
from meshwright.record import Record
from meshwright.units import show_seconds

if TYPE_CHECKING:
    from meshwright.verification import Verification


EXAMPLES = (
    "meshwright verify tiny --on cpu:8 --mesh 2,2,2,1 --batch 16 --seq-len 256",
    "meshwright verify llama3-8b --num-layers 2 --on v5e:4x4 --mesh 1,4,4,1 --batch 16",
    "meshwright verify plan.yaml --run runs/tiny",
    "meshwright verify runs/tiny",
)


@dataclass(frozen=True)
class CompareArgs:
    """What to compare, and how."""

    mesh: Mesh = None
    """fsdp=-1,tp=4, or dp,fsdp,tp,sp as 1,-1,4,1. One degree may be -1. Default: the planner chooses."""
    run: Annotated[Path | None, option("DIRECTORY")] = None
    """Compare with what a run of the same step measured too."""
    effort: Annotated[Literal["fast", "default"], option("fast|default")] = "fast"
    """The TPU compiler's: fast gives counts and bytes, default the schedule that will run. TPUs only. Default: fast."""
    tolerance: Annotated[float | None, option("SHARE")] = None
    """End with code 1 where a difference is a larger share than this of what was predicted, as 0.1."""
    html: Annotated[Path | None, option("FILE", "-o")] = None
    """Write one page with all of it, and the timeline of the step."""
    json: Json = False
    """Print {"predicted", "compiled", "measured", "rows", "differences"} instead of the table."""


@dataclass(frozen=True)
class Args:
    """Compile the real train step for a mesh and compare predicted | compiled; no accelerator is needed."""

    model: Annotated[tyro.conf.Positional[str], positional("MODEL")]
    """A preset (tiny, llama3-8b, …), the path of a Hugging Face config.json, a plan.yaml, or a run directory."""
    workload: WorkloadArgs = field(default_factory=WorkloadArgs)
    compare: CompareArgs = field(default_factory=CompareArgs)
    strategy: StrategyArgs = field(default_factory=StrategyArgs)


def run(args: Args) -> int:
    """Compile, compare, print; 1 where a difference exceeds the tolerance."""
    compare = args.compare
    if compare.html is not None:
        check_output(compare.html)
    options = given_options(args.workload, args.strategy) | {"mesh": compare.mesh}
    what: str | Plan = args.model
    if not Path(args.model).is_dir():
        what, options = plan_to_run(args.model, options), {}  # A mistake is told of before JAX is loaded.
    page, tolerance, as_json = compare.html, compare.tolerance, compare.json
    if tolerance is not None and tolerance < 0:
        raise MeshwrightError(f"--tolerance is {tolerance:g}; it is a share from 0, as 0.1")
    with waiting("loading JAX"):
        from meshwright.verification import plan_and_measured, verify_plan

    plan, measured = plan_and_measured(what, compare.run, options)
    effort = compare.effort if plan.system.chip.kind == "tpu" else "fast"
    check_all_read(args, f"on {plan.hardware}")
    with waiting(f"compiling {plan.workload.model.name} on {plan.mesh} for {plan.hardware}"):
        found = verify_plan(plan, effort=effort, measured=measured)
    if page is not None:
        with waiting(f"writing {page}"):
            _write_page(page, found, measured)
    if as_json:
        print(json.dumps(_json(found, measured), indent=2))
    else:
        _print(found)
        if is_plan_file(args.model):
            print(next_line(f"meshwright train {shlex.quote(args.model)}", note=f"on {plan.hardware}"))
    beyond = [] if tolerance is None else [row for row in found.rows if row.exceeds(tolerance)]
    if beyond and tolerance is not None:
        names = ", ".join(row.quantity for row in beyond)
        print(f"beyond --tolerance {tolerance:g}: {names}", file=sys.stderr)
    return int(bool(beyond))


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
    from meshwright.viz.pages import verify_page

    write_file(path, verify_page(found, measured))


def _print(found: Verification) -> None:
    """The table, and one of what a run measured beside it."""
    from meshwright.viz.words import row_tables

    plan, program, rows = found.plan, found.program, found.rows
    took = f"in {show_seconds(program.compile_seconds)}{' (cached)' if program.cached else ''}"
    show(console(), headline(plan.workload, plan.hardware))
    show(console(), f"mesh {plan.mesh} · compiled by {program.compiler} {took}")
    print()
    for columns, cells, differs in row_tables(rows):
        styles = ["yellow" if is_marked else "" for is_marked in differs]
        show(console(), table(columns, cells, left=(0, -1), folds=-1, styles=styles))
        print()
    different = sum(not row.is_equal for row in rows)
    print(f" {len(rows) - different} of {len(rows)} quantities are equal; {different} differ, each named above")
    for note in dict.fromkeys((*plan.predicted.notes, *found.compiled.notes)):
        print(folded(f"note: {note}"))
