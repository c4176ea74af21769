"""The thresholds near a plan: at how many more chips, at what batch and sequence length something else binds."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from meshwright.errors import MeshwrightError
from meshwright.hardware import System, make_system
from meshwright.mesh import MeshShape
from meshwright.planner.explain import data_axes, dearest_axes, local_tokens, wanted_tokens
from meshwright.planner.plan import Plan, make_plan
from meshwright.planner.search import find_best
from meshwright.units import show_bytes, show_percent
from meshwright.workload import Workload, check_mesh

FARTHEST = 64
"""The largest factor that is looked at."""


def nearby(plan: Plan) -> list[str]:
    """What changes the answer, a line each: at how many chips and at what batch something else binds, and the length
    from which it does not fit.

    The way a plan runs is kept; but fsdp, or else dp, takes more chips, and microbatches are as many as keep their
    tokens, where a device has the sequences for it.
    """
    return [_more_chips(plan), _batch(plan), _longer(plan)]


def chips_that_fit(plan: Plan) -> Plan | None:
    """The best plan on the fewest chips, by factors of two, on which the step of a plan fits; None up to `FARTHEST`."""
    choices = {"attention": plan.strategy.attention, "optimizer": plan.strategy.optimizer}
    for factor in _factors():
        try:
            found = find_best(plan.workload, _larger(plan.system, factor), remats=(plan.workload.remat,), **choices)
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


def _more_chips(plan: Plan) -> str:
    """The first factor of chips, for the same batch, at which a plan is communication bound."""
    if is_communication_bound(plan):
        by_rule = "by the rule of thumb " if plan.predicted.bound != "communication" else ""
        return f"{by_rule}communication bound already {_over(plan)}"
    axis = "fsdp" if plan.mesh.fsdp > 1 else "dp"
    last = plan
    for factor in _factors():
        try:
            last = _plan(plan, mesh=replace(plan.mesh, **{axis: factor * plan.mesh.degree(axis)}), factor=factor)
        except MeshwrightError as error:
            return f"up to {_chips(last)} chips it stays {last.predicted.bound} bound; beyond: {error}"
        if is_communication_bound(last):
            return f"at {factor}x the chips ({_chips(last)}) this becomes communication bound {_over(last)}"
    return f"at {FARTHEST}x the chips ({_chips(last)}) it is {last.predicted.bound} bound still"


def _batch(plan: Plan) -> str:
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
            verb = f"communication bound {_over(last)}"
            if is_bound:
                verb = f"{last.predicted.bound} bound by that too, with {local_tokens(last):,} tokens a device"
            return f"at a batch of {batch:,} this becomes {verb}"
    bound = "communication" if is_bound else str(plan.predicted.bound)
    if last is plan:
        return f"no smaller batch than {plan.workload.batch:,} can be shared out on this mesh"
    return f"{'up' if is_bound else 'down'} to a batch of {last.workload.batch:,} it stays {bound} bound on this mesh"


def _longer(plan: Plan) -> str:
    """The sequence length from which a plan does not fit."""
    if not plan.predicted.fits:
        return "it does not fit as it is"
    model, last = plan.workload.model, plan
    for factor in _factors():
        seq_len = factor * plan.workload.seq_len
        if model.positions == "learned" and seq_len > model.max_positions:
            return (
                f"sequences of {last.workload.seq_len:,} tokens fit; {model.name} has {model.max_positions:,} positions"
            )
        try:
            last = _plan(plan, workload=replace(plan.workload, seq_len=seq_len), parts=factor)
        except MeshwrightError as error:
            return f"sequences up to {seq_len // 2:,} tokens fit; beyond: {error}"
        if not last.predicted.fits:
            peak = show_bytes(last.predicted.memory_bytes["peak"])
            room = show_bytes(plan.system.usable_bytes)
            return f"at {seq_len:,} tokens a sequence it no longer fits: {peak} of {room}"
    return f"sequences of {last.workload.seq_len:,} tokens fit still"


def _plan(
    plan: Plan, *, workload: Workload | None = None, mesh: MeshShape | None = None, factor: int = 1, parts: int = 1
) -> Plan:
    """A plan with another workload, or another mesh on `factor` times the chips; of `parts` times the microbatches."""
    system = plan.system if factor == 1 else _larger(plan.system, factor)
    read, shape = workload or plan.workload, mesh or plan.mesh
    shards = shape.degree(("dp", "fsdp", "ep"))
    if read.batch % shards:
        raise MeshwrightError(f"a batch of {read.batch:,} sequences cannot be shared out over {shards:,} devices")
    check_mesh(read, shape)
    each = read.batch // shards
    strategy = plan.strategy
    fewer = replace(strategy, num_microbatches=math.gcd(each, parts * strategy.num_microbatches))
    if fewer.num_microbatches % shape.pp:
        fewer = replace(fewer, virtual_stages=1)
    return make_plan(read, shape, system, fewer)


def _larger(system: System, factor: int) -> System:
    """So many times the chips, in as many slices; where no slice is so large, in more of them."""
    count = factor * system.num_chips // system.num_slices
    return make_system(system.chip, (count,), num_slices=system.num_slices)


def _over(plan: Plan) -> str:
    """Over which axes communication is exposed, why, and for how much of the step."""
    share = plan.predicted.breakdown_seconds["exposed communication"] / (plan.predicted.step_seconds or 1.0)
    exposed = f"{show_percent(share)} of the step exposed"
    axes = data_axes(plan)
    if axes and (tokens := local_tokens(plan)) < (wanted := wanted_tokens(plan, axes)):
        return f"on {'*'.join(axes)}: {tokens:,} tokens a device < {wanted:,}, {exposed}"
    return f"on {'*'.join(dearest_axes(plan.predicted))}: {exposed}"


def _factors() -> Iterator[int]:
    """The factors that are looked at: 2, 4, 8, …"""
    factor = 2
    while factor <= FARTHEST:
        yield factor
        factor *= 2


def _chips(plan: Plan) -> str:
    """The chips of a plan, as text."""
    return f"{plan.system.num_chips:,}"
