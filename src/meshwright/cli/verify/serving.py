"""`meshwright verify … --serve decode` or `--serve prefill`: compare a server's compiled step with a serving plan."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, Protocol

from meshwright.cli.typed import check_all_read
from meshwright.cli.verify.tolerance import exit_code, read_tolerance
from meshwright.cli.waiting import waiting
from meshwright.cli.words.spell import spelled
from meshwright.description.step.serving import CacheSplit
from meshwright.options.declare import Json, Mesh, given_options, option, positional
from meshwright.options.serving import FormatArgs, ServedArgs
from meshwright.pictures.screens.verification import print_verification, verification_data
from meshwright.pictures.text import next_line
from meshwright.planning.serving.plan import ServingPlan
from meshwright.planning.serving.search import best_serving_plan


@dataclass(frozen=True)
class ServedCompareArgs:
    """Comparison."""

    mesh: Mesh = None
    """tp=8,sp=2, or dp,fsdp,tp,sp as 1,1,8,2. One degree may be -1. Default: the planner chooses."""
    cache: Annotated[CacheSplit | None, option("heads|batch|sequence")] = None
    """Split of the cache besides heads: none, rows or tokens. Default: the planner chooses."""
    effort: Annotated[Literal["fast", "default"], option("fast|default")] = "fast"
    """Effort of the TPU compiler: fast gives counts and bytes, default also the final schedule. Default: fast."""
    tolerance: Annotated[float | None, option("SHARE")] = None
    """Exit with 1 if a difference exceeds this fraction of the prediction, as 0.1."""
    json: Json = False
    """Print {"predicted", "compiled", "rows", "differences"} instead of the table."""


@dataclass(frozen=True)
class ServeArgs:
    """Compile the step of a server for a mesh and compare predicted | compiled; no accelerator is needed."""

    model: Annotated[str, positional("MODEL")]
    """A preset (llama3-8b, …), a Hugging Face directory, or the path of its config.json."""
    served: ServedArgs = field(default_factory=ServedArgs)
    formats: FormatArgs = field(default_factory=FormatArgs)
    compare: ServedCompareArgs = field(default_factory=ServedCompareArgs)


class _Compare(Protocol):
    """The options of a comparison that every kind of step has."""

    @property
    def effort(self) -> Literal["fast", "default"]: ...
    @property
    def tolerance(self) -> float | None: ...
    @property
    def json(self) -> bool: ...


def verify_served(args: ServeArgs) -> int:
    """Plan, compile, compare, print; return 1 if a difference exceeds the tolerance."""
    options = given_options(args.served, args.formats)
    phase = options.pop("serve")
    plan = best_serving_plan(args.model, phase, options, mesh=args.compare.mesh, cache=args.compare.cache)
    return verify_serving_plan(args, plan, args.compare)


def verify_serving_plan(args: Any, plan: ServingPlan, compare: _Compare) -> int:
    """Compile the step of a plan, compare, print; return 1 if a difference exceeds the tolerance."""
    tolerance, as_json = read_tolerance(compare.tolerance), compare.json
    effort = compare.effort if plan.system.chip.kind == "tpu" else "fast"
    check_all_read(args, f"on {plan.hardware}")
    with waiting("loading JAX"):
        from meshwright.proof.verification.serving import verify_serving

    serving = plan.serving
    with waiting(f"compiling {serving.model.name} on {plan.layout} for {plan.hardware}"):
        found = verify_serving(plan, effort=effort)
    if as_json:
        print(json.dumps(verification_data(found), indent=2))
    else:
        print_verification(found)
        print(_next(args, plan))
    return exit_code(found.rows, tolerance)


def _next(args: Any, plan: ServingPlan) -> str:
    """Return the line that suggests the next command: without a plan's file, `plan` to write the same plan to one.

    Else `serve` for a decode plan, or `verify` with a tolerance for a prefill plan.
    """
    if isinstance(args, ServeArgs):
        line = spelled("plan", args, without=("cache", "effort", "tolerance"), serve=args.served.serve)
        return next_line(f"{line} -o plan.yaml")
    if plan.serving.phase == "decode":
        return next_line(f"meshwright serve DIRECTORY --plan {shlex.quote(args.model)}", note=f"on {plan.hardware}")
    return next_line(spelled("verify", args, tolerance=0.1), note="as a test")
