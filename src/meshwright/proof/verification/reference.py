"""The frozen reference model of a step: a separate program, merged into one record with the policy's program."""

from __future__ import annotations

from dataclasses import asdict, replace

from meshwright.description.step.reference import reference_pass, shares_base
from meshwright.planning.cost.model_states import States
from meshwright.planning.plan import Plan
from meshwright.proof.compiler.program import CompileRequest
from meshwright.proof.compiler.targets import Effort
from meshwright.record import Record, merge

REFERENCE_STEP = "meshwright.execution.training.preference.reference:lower_reference_step"
"""The function that lowers the reference's pass, called by name in the process that compiles."""


def reference_requests(plan: Plan, *, effort: Effort) -> tuple[CompileRequest, ...]:
    """Return the request to compile the reference model's pass of a plan's step; () if the step has none."""
    if (own := reference_pass(plan.workload, plan.mesh, plan.strategy)) is None:
        return ()
    arguments = {"workload": asdict(plan.workload), "strategy": asdict(plan.strategy)}
    return (
        CompileRequest(
            function=REFERENCE_STEP, hardware=plan.hardware, mesh=own.mesh.layout, arguments=arguments, effort=effort
        ),
    )


def with_reference(policy: Record, reference: Record, plan: Plan) -> Record:
    """Return the record of a step that runs two programs: first the reference model's, then the policy's.

    While one program runs, the other's arguments stay in memory. Parameters that both read count once.
    """
    ours, theirs, shared = policy.memory_bytes, reference.memory_bytes, 0
    if shares_base(plan.workload, plan.mesh, plan.strategy):
        is_tiled = plan.system.chip.kind == "tpu"
        shared = int(States(plan.workload, plan.mesh, plan.strategy, is_tiled=is_tiled).frozen)
    arguments = ours["arguments"] + theirs["arguments"] - shared
    peak = max(ours["peak"] + theirs["arguments"], theirs["peak"] + ours["arguments"]) - shared
    moves = (replace(move, phase="reference") for move in reference.collectives)
    found = replace(
        policy,
        flops=(policy.flops or 0.0) + (reference.flops or 0.0),
        memory_bytes={**ours, "arguments": arguments, "temporaries": peak - arguments, "peak": peak},
        fits=None if policy.fits is None else peak <= plan.system.usable_bytes,
        collectives=merge((*moves, *policy.collectives)),
        notes=tuple(dict.fromkeys((*policy.notes, *reference.notes))),
    )
    if policy.step_seconds is None or reference.step_seconds is None:
        return found
    seconds = policy.step_seconds + reference.step_seconds
    share = policy.step_seconds / seconds
    return replace(
        found,
        step_seconds=seconds,
        mfu=None if policy.mfu is None else share * policy.mfu,
        tokens_per_second=None if policy.tokens_per_second is None else share * policy.tokens_per_second,
        breakdown_seconds={**policy.breakdown_seconds, "reference": reference.step_seconds},
    )
