"""The thresholds near a plan, as facts: at how many more chips, what batch and sequence length something else binds."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from meshwright.errors import MeshwrightError
from meshwright.mesh import MeshShape
from meshwright.planner.explain import data_axes, dearest_axes, local_tokens, wanted_tokens
from meshwright.planner.facts import (
    Exposure,
    LongerSequences,
    MoreChips,
    NearbyFact,
    OtherBatch,
    SequenceLimit,
    Turn,
)
from meshwright.planner.plan import Plan, make_plan
from meshwright.planner.search import find_best
from meshwright.step import RULES, Workload, check_mesh, learned_positions, stream_rules

MAX_FACTOR = 64
"""The largest factor that is looked at."""


def nearby(plan: Plan) -> tuple[NearbyFact, ...]:
    """What changes the answer: at how many chips and at what batch something else binds, and the length from which it
    does not fit.

    The way a plan runs is kept; but fsdp, or else dp, takes more chips, and microbatches are as many as keep their
    tokens, where a device has the sequences for it.
    """
    return (_more_chips(plan), _batch(plan), _longer(plan))


def chips_that_fit(plan: Plan) -> Plan | None:
    """The best plan on the fewest chips, by factors of 2, on which a plan fits; None up to `MAX_FACTOR`."""
    choices = {"attention": plan.strategy.attention, "optimizer": plan.strategy.optimizer}
    is_run = not plan.planned_only
    for factor in _factors():
        try:
            system = plan.system.resized(factor * plan.system.num_chips)
            found = find_best(plan.workload, system, remats=(plan.workload.remat,), is_runnable=is_run, **choices)
        except MeshwrightError:
            continue
        if found.predicted.fits:
            return found
    return None


def is_communication_bound(plan: Plan) -> bool:
    """Whether collectives take longer than what hides them: those of weights and gradients by the rule, or the step."""
    axes = data_axes(plan)
    by_rule = bool(axes) and local_tokens(plan) < wanted_tokens(plan, axes)
    return by_rule or plan.predicted.bound == "communication"


def _more_chips(plan: Plan) -> MoreChips:
    """The first factor of chips, for the same batch, at which a plan is communication bound."""
    bound = plan.predicted.bound
    if is_communication_bound(plan):
        return MoreChips(Turn.ALREADY, bound, exposure=_exposure(plan), by_rule=bound != "communication")
    axis = "fsdp" if plan.mesh.fsdp > 1 else "dp"
    last, factor = plan, 1
    for factor in _factors():
        try:
            last = _plan(plan, mesh=replace(plan.mesh, **{axis: factor * plan.mesh.degree(axis)}), factor=factor)
        except MeshwrightError as error:
            return MoreChips(Turn.ENDS, last.predicted.bound, factor, last.system.num_chips, reason=str(error))
        if is_communication_bound(last):
            return MoreChips(Turn.TURNS, last.predicted.bound, factor, last.system.num_chips, _exposure(last))
    return MoreChips(Turn.STAYS, last.predicted.bound, factor, last.system.num_chips)


def _batch(plan: Plan) -> OtherBatch:
    """The batch on the same chips at which a plan changes sides between compute and communication."""
    is_bound = is_communication_bound(plan)
    last = plan
    for factor in _factors():
        batch = plan.workload.batch * factor if is_bound else plan.workload.batch // factor
        try:
            last = _plan(plan, workload=replace(plan.workload, batch=max(1, batch)))
        except MeshwrightError:
            break
        if is_communication_bound(last) != is_bound:
            exposure = None if is_bound else _exposure(last)
            return OtherBatch(Turn.TURNS, batch, is_bound, last.predicted.bound, local_tokens(last), exposure)
    turn = Turn.ENDS if last is plan else Turn.STAYS
    return OtherBatch(turn, last.workload.batch, is_bound, "communication" if is_bound else plan.predicted.bound)


def _longer(plan: Plan) -> LongerSequences:
    """The sequence length from which a plan does not fit."""
    if not plan.predicted.fits:
        return LongerSequences(SequenceLimit.ALREADY)
    model, last = plan.workload.model, plan
    most = learned_positions(model)
    for factor in _factors():
        seq_len = factor * plan.workload.seq_len
        if most is not None and seq_len > most:
            return LongerSequences(SequenceLimit.POSITIONS, last.workload.seq_len, model=model.name, positions=most)
        try:
            last = _plan(plan, workload=replace(plan.workload, seq_len=seq_len), parts=factor)
        except MeshwrightError as error:
            return LongerSequences(SequenceLimit.MESH, seq_len // 2, reason=str(error))
        if not last.predicted.fits:
            peak = last.predicted.memory_bytes["peak"]
            return LongerSequences(SequenceLimit.MEMORY, seq_len, peak, plan.system.plannable_bytes)
    return LongerSequences(SequenceLimit.NONE, last.workload.seq_len)


def _plan(
    plan: Plan, *, workload: Workload | None = None, mesh: MeshShape | None = None, factor: int = 1, parts: int = 1
) -> Plan:
    """A plan with another workload, or another mesh on `factor` times the chips; of `parts` times the microbatches."""
    system = plan.system if factor == 1 else plan.system.resized(factor * plan.system.num_chips)
    read, shape = workload or plan.workload, mesh or plan.mesh
    shards = shape.degree(RULES["batch"])
    if read.batch % shards:
        raise MeshwrightError(f"a batch of {read.batch:,} sequences cannot be shared out over {shards:,} devices")
    check_mesh(read, shape, stream_rules(plan.strategy.tp_stream))
    each = read.batch // shards
    strategy = plan.strategy
    fewer = replace(strategy, num_microbatches=math.gcd(each, parts * strategy.num_microbatches))
    if fewer.reference_mesh is not None and factor > 1:
        # More chips have more copies of the reference.
        own = fewer.reference_mesh
        fewer = replace(fewer, reference_mesh=replace(own, dp=factor * own.dp))
    if fewer.num_microbatches % shape.pp:
        fewer = replace(fewer, virtual_stages=1)
    return make_plan(read, shape, system, fewer)


def _exposure(plan: Plan) -> Exposure:
    """Over which axes communication is exposed, why, and for how much of the step."""
    share = plan.predicted.breakdown_seconds["exposed communication"] / (plan.predicted.step_seconds or 1.0)
    axes = data_axes(plan)
    if axes and (tokens := local_tokens(plan)) < (wanted := wanted_tokens(plan, axes)):
        return Exposure(axes, share, tokens, wanted)
    return Exposure(dearest_axes(plan.predicted), share)


def _factors() -> Iterator[int]:
    """The factors that are looked at: 2, 4, 8, …"""
    factor = 2
    while factor <= MAX_FACTOR:
        yield factor
        factor *= 2
