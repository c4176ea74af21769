"""`meshwright verify`: compile a step with its real compiler, and compare it with its plan.

The step is a train step or, with --serve or a serving plan's file, a server's step (`verify_serving`).
"""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from meshwright.cli.typed import check_all_read
from meshwright.cli.verify.serving import ServeArgs, verify_served, verify_serving_plan
from meshwright.cli.verify.tolerance import exit_code, read_tolerance
from meshwright.cli.waiting import waiting
from meshwright.cli.words.spell import spelled
from meshwright.errors import MeshwrightError
from meshwright.options.declare import Json, Mesh, given_options, option, positional
from meshwright.options.plan import StrategyArgs, WorkloadArgs
from meshwright.pictures.screens.verification import print_verification, verification_data
from meshwright.pictures.text import next_line
from meshwright.planning.files import is_run_directory
from meshwright.planning.library import plan_to_run
from meshwright.planning.plan import Plan, is_plan_file
from meshwright.planning.serving.plan import is_serving_plan_file, read_serving_plan
from meshwright.planning.sweep import Sweep, read_sweep
from meshwright.support.files import check_output, write_file

EXAMPLES = (
    "meshwright verify tiny --on cpu:8 --mesh 2,2,2,1 --batch 16 --seq-len 256",
    "meshwright verify llama3-8b --num-layers 2 --on v5e:4x4 --mesh 1,4,4,1 --batch 16",
    "meshwright verify plan.yaml --run runs/tiny",
    "meshwright verify runs/tiny",
    "meshwright verify tiny --on cpu:8 --mesh fsdp=-1 --batch 16 --sweep 1,2,4,8",
    "meshwright verify llama3-8b --serve decode --on v5e:4x4",
    "meshwright verify llama3-8b --serve prefill --on v5e:4x4 --batch 16",
    "meshwright verify llama3-8b --serve prefill --chunk 256 --on v5e:4x4",
)


@dataclass(frozen=True)
class CompareArgs:
    """Comparison."""

    mesh: Mesh = None
    """fsdp=-1,tp=4, or dp,fsdp,tp,sp as 1,-1,4,1. One degree may be -1. Default: the planner chooses."""
    run: Annotated[Path | None, option("DIRECTORY")] = None
    """Also compare with measurements of a run of the same step."""
    effort: Annotated[Literal["fast", "default"], option("fast|default")] = "fast"
    """Effort of the TPU compiler: fast gives counts and bytes, default also the final schedule. Default: fast."""
    sweep: Annotated[str | None, option("KEY=VALUES")] = None
    """Verify the step for values of one key: chips=1,2,4,8 (or only 1,2,4,8), batch=16,32 or seq-len=1k..8k."""
    tolerance: Annotated[float | None, option("SHARE")] = None
    """Exit with 1 if a difference exceeds this fraction of the prediction, as 0.1."""
    html: Annotated[Path | None, option("FILE", "-o")] = None
    """Write one page with everything, and the step's timeline."""
    json: Json = False
    """Print {"predicted", "compiled", "measured", "rows", "differences"} instead of the table."""


@dataclass(frozen=True)
class Args:
    """Compile the real train step for a mesh and compare predicted | compiled; no accelerator is needed."""

    model: Annotated[str, positional("MODEL")]
    """A preset (tiny, llama3-8b, …), the path of a Hugging Face config.json, a plan.yaml, or a run directory."""
    workload: WorkloadArgs = field(default_factory=WorkloadArgs)
    compare: CompareArgs = field(default_factory=CompareArgs)
    strategy: StrategyArgs = field(default_factory=StrategyArgs)


KINDS: dict[str, type] = {"a train step": Args, "a server's step (--serve decode)": ServeArgs}
"""The kinds of steps, as messages name them."""

HINTS = {
    ServeArgs: {"--batch-tokens": "--batch", "--seq-len": "--prompt-len", "--param-dtype": "--weight-dtype"},
    Args: {"--prompt-len": "--seq-len", "--weight-dtype": "--param-dtype"},
}
"""For each kind of step, the options of the other kind, with the option to use instead."""


def args_of(words: list[str]) -> type:
    """Return the dataclass of the arguments: with --serve for a server's step, else for a train step."""
    return ServeArgs if any(word.split("=")[0] == "--serve" for word in words) else Args


def run(args: Args | ServeArgs) -> int:
    """Compile, compare, print; return 1 if a difference exceeds the tolerance."""
    if isinstance(args, ServeArgs):
        return verify_served(args)
    if is_serving_plan_file(args.model):
        return verify_serving_plan(args, read_serving_plan(Path(args.model)), args.compare)
    compare = args.compare
    if compare.sweep is not None:
        return _swept(args, read_sweep(compare.sweep))
    if compare.html is not None:
        check_output(compare.html)
    options = given_options(args.workload, args.strategy) | {"mesh": compare.mesh}
    what: str | Plan = args.model
    if not Path(args.model).is_dir():
        what, options = plan_to_run(args.model, options), {}  # Report mistakes before JAX is loaded.
    page, tolerance, as_json = compare.html, read_tolerance(compare.tolerance), compare.json
    with waiting("loading JAX"):
        from meshwright.proof.verification.library import plan_and_measured
        from meshwright.proof.verification.plans import verify_plan

    plan, measured = plan_and_measured(what, compare.run, options)
    effort = compare.effort if plan.system.chip.kind == "tpu" else "fast"
    check_all_read(args, f"on {plan.hardware}")
    with waiting(f"compiling {plan.workload.model.name} on {plan.mesh} for {plan.hardware}"):
        found = verify_plan(plan, effort=effort, measured=measured)
    if page is not None:
        with waiting(f"writing {page}"):
            from meshwright.pictures.pages import verify_page

            write_file(page, verify_page(found, measured))
    if as_json:
        print(json.dumps(verification_data(found, measured), indent=2))
    else:
        print_verification(found)
        print(_next(args, plan))
    return exit_code(found.rows, tolerance)


def _swept(args: Args, sweep: Sweep) -> int:
    """Verify the step of each value of a sweep; return 1 if a difference exceeds the tolerance."""
    from meshwright.cli.verify.sweep import verify_sweep

    options = given_options(args.workload, without=sweep.replaced)
    others = given_options(args.strategy) | {"mesh": args.compare.mesh}
    if options.get("on") is None or is_plan_file(args.model):
        raise MeshwrightError(f"--sweep is of a model on --on CHIPS; {args.model} sets its hardware itself")
    tolerance, effort, as_json = read_tolerance(args.compare.tolerance), args.compare.effort, args.compare.json
    check_all_read(args, "with --sweep")
    found = verify_sweep(args.model, sweep, options, others, effort=effort, as_json=as_json)
    return exit_code((row for one in found for row in one.rows), tolerance)


def _next(args: Args, plan: Plan) -> str:
    """Return the line that suggests the next command: `train` for the compiled plan; for a run, `report`."""
    if is_run_directory(args.model):
        return next_line(f"meshwright report {shlex.quote(args.model)}")
    train = spelled("train", args, without=("run", "effort", "tolerance", "html"))
    return next_line(train, note=f"on {plan.hardware}")
