"""Explain the difference between a server's simulated and predicted step time by causes, whose seconds add up to it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from meshwright.execution.models.generation.cached_attention import CACHED_ATTENTION
from meshwright.execution.models.generation.stationary import WEIGHTS
from meshwright.planning.serving.plan import ServingPlan
from meshwright.proof.simulate.events import COMPUTE, Event
from meshwright.proof.simulate.schedule import EXPOSED_COMMUNICATION, Schedule
from meshwright.proof.verification.differences import Cause, Difference

PLANNED_TERMS: Mapping[str, tuple[str, ...]] = {
    "matmuls with weights": ("weights", "products"),
    "attention": ("cache", "attention"),
    "norms, sums and other ops": ("elementwise",),
    EXPOSED_COMMUNICATION: ("communication",),
}
"""For each part of a compiled step, the terms of the predicted step time for the same work."""

TPU_DIFFERENCES: Mapping[str, Difference] = {
    "matmuls with weights": Difference.READ_THEN_MULTIPLIED,
    "attention": Difference.GATHERED_PAGES,
}
"""Why XLA:TPU's ops take longer than predicted, by part of the step, besides the least time of each op."""

LEAST_SHARE = 0.005
"""The share of the predicted step time below which a cause is left out."""


@dataclass(frozen=True)
class StepParts:
    """The seconds of a simulated step: the least time of each op, and the rest by part.

    count: the number of ops that the TPU compiler estimates. least_seconds: the time of a small one. small_ops: that
    time, or less, of all of them together. rest: by key of `PLANNED_TERMS`, and exposed waits.
    """

    count: int
    least_seconds: float
    small_ops: float
    rest: Mapping[str, float]


def step_parts(schedule: Schedule) -> StepParts:
    """Return the parts of a simulated step. On other hardware than TPUs `count` is 0."""
    ops = [event for event in schedule.events if event.lane == COMPUTE and event.kind != "loop"]
    estimated = sorted((event for event in ops if event.basis == "compiler"), key=lambda event: event.seconds)
    least = _least_seconds(estimated)
    rest, small = dict.fromkeys(PLANNED_TERMS, 0.0), 0.0
    for event in ops:
        own = event.count * min(least, event.seconds) if event.basis == "compiler" else 0.0
        rest[_part(event)] += event.total_seconds - own
        small += own
    phases = {event.phase for event in ops}
    rest |= {name: time for name, time in schedule.breakdown_seconds.items() if time and name not in phases}
    return StepParts(sum(event.count for event in estimated), least, small, rest)


def step_causes(plan: ServingPlan, schedule: Schedule) -> tuple[Cause, ...]:
    """Return the causes of the difference between the planned and the simulated step time, largest first, with seconds.

    The TPU compiler estimates over a microsecond for even the smallest op. This least time times the number of ops is
    compared with the plan's term `small ops`, which has only what is not hidden behind the reading of weights. The rest
    of each op's time is compared with the plan's term for the same work.
    """
    parts, terms = step_parts(schedule), plan.predicted.breakdown_seconds
    is_tpu, causes = parts.count > 0, list[Cause]()
    if is_tpu:
        more = parts.small_ops - terms["small ops"]
        causes.append(
            Cause(
                difference=Difference.LEAST_OP_TIME,
                count=parts.count,
                least_seconds=parts.least_seconds,
                seconds=more,
            )
        )
    has_kernel = any(
        event.basis != "compiler" and _part(event) == "attention" for event in schedule.events if event.kind == "op"
    )
    for part, seconds in parts.rest.items():
        more = seconds - sum(terms[term] for term in PLANNED_TERMS.get(part, ()))
        known = TPU_DIFFERENCES.get(part) if is_tpu and more > 0 else None
        if known == Difference.GATHERED_PAGES and has_kernel:
            known = None
        if known == Difference.READ_THEN_MULTIPLIED and plan.serving.model.experts is not None:
            known = Difference.EXPERT_BUFFERS
        causes.append(Cause(difference=known or Difference.STEP_TERM, term=part, seconds=more))
    least_seconds = LEAST_SHARE * sum(terms.values())
    found = [cause for cause in causes if abs(cause.seconds or 0.0) >= least_seconds]
    return tuple(sorted(found, key=lambda cause: -abs(cause.seconds or 0.0)))


def _least_seconds(ops: Sequence[Event]) -> float:
    """Return the typical time of a smallest op, in seconds: the lower quartile over all executions; 0 for no ops.

    ops: shortest first.
    """
    left = sum(event.count for event in ops) / 4
    for event in ops:
        left -= event.count
        if left <= 0:
            return event.seconds
    return 0.0


def _part(event: Event) -> str:
    """Return the part of the step (a key of `PLANNED_TERMS`) that an op belongs to, by its named scopes."""
    scopes = event.scope.split("/")
    if CACHED_ATTENTION in scopes:
        return "attention"
    return "matmuls with weights" if WEIGHTS in scopes else "norms, sums and other ops"
