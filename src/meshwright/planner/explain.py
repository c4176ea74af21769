"""Why: how the best plan runs, what binds it, and the one reason for which each of the others loses."""

from __future__ import annotations

import math
from collections.abc import Iterator

from meshwright.cost import gather_bytes_per_second, network_intensity
from meshwright.hardware import lay_mesh
from meshwright.planner.plan import Plan
from meshwright.record import Record
from meshwright.units import show_bytes, show_percent, show_seconds
from meshwright.workload import token_axes

ATTENTION = {"scores": "attention scores through memory", "flash": "a fused attention kernel"}
"""The kinds of attention in words; others go by their own name."""


def how(plan: Plan) -> str:
    """The way a plan runs its mesh, in a few words: remat, microbatches, schedule, ZeRO stage, rings, attention."""
    strategy, parts = plan.strategy, [f"remat {plan.workload.remat}"]
    if strategy.num_microbatches > 1:
        parts.append(f"{strategy.num_microbatches} microbatches")
    if plan.mesh.pp > 1:
        parts.append(strategy.schedule)
    if strategy.virtual_stages > 1:
        parts.append(f"interleaved, {strategy.virtual_stages} virtual stages")
    if plan.mesh.fsdp > 1:
        parts.append(f"ZeRO-{strategy.zero_stage}")
    if plan.mesh.tp > 1 and strategy.overlaps_tp:
        parts.append("tp in rings beside products")
    parts += [ATTENTION.get(strategy.attention, f"{strategy.attention} attention"), strategy.optimizer]
    return " · ".join(parts)


def why(plan: Plan) -> list[str]:
    """What decides the step of a plan, a line each, with the numbers."""
    lines = (_tokens(plan), _tensor(plan), _exposed(plan), _bubble(plan), _memory(plan))
    return [line for line in lines if line]


def wanted_tokens(plan: Plan, axes: tuple[str, ...]) -> int:
    """The tokens a device that hide the weights and gradients which some axes gather and sum: C / W, times E / k.

    Of a mixture of experts all E are gathered and k work on a token (scaling book, training and gpus: data
    parallelism). Those that ep splits need not be gathered.
    """
    placement = lay_mesh(plan.system, plan.mesh.layout).placement(axes)
    wanted = network_intensity(plan.system, gather_bytes_per_second(placement), dtype=plan.workload.compute_dtype)
    experts = plan.workload.model.experts
    spread = max(1.0, experts.count / experts.num_active / plan.mesh.ep) if experts else 1.0
    return math.ceil(wanted * spread)


def data_axes(plan: Plan) -> tuple[str, ...]:
    """The axes over which weights are gathered or gradients summed, of more than one device."""
    return tuple(axis for axis in token_axes() if axis != "ep" and plan.mesh.degree(axis) > 1)


def local_tokens(plan: Plan) -> int:
    """The tokens of one device in a step."""
    return plan.workload.tokens // plan.mesh.degree(token_axes())


def _tokens(plan: Plan) -> str:
    """The tokens that a device has beside those that hide its weights and gradients."""
    axes, tokens = data_axes(plan), local_tokens(plan)
    if not axes:
        return f"{tokens:,} tokens a device, and no axis gathers weights or sums gradients"
    wanted = wanted_tokens(plan, axes)
    verb = "hide" if tokens >= wanted else "do not hide"
    return f"{tokens:,} tokens a device {verb} weights and gradients over {'*'.join(axes)}, which want {wanted:,}"


def _tensor(plan: Plan) -> str:
    """The degree of tp beside the one up to which its products take longer than its collectives."""
    if plan.mesh.tp == 1:
        return ""
    placement = lay_mesh(plan.system, plan.mesh.layout).placement("tp")
    alpha = network_intensity(plan.system, gather_bytes_per_second(placement), dtype=plan.workload.compute_dtype)
    width = plan.workload.model.mlp
    side = "below" if plan.mesh.tp < width / alpha else "not below"
    return f"tp={plan.mesh.tp} is {side} mlp / alpha = {width:,} / {alpha:,.0f} = {width / alpha:.3g}, on {placement}"


def _exposed(plan: Plan) -> str:
    """What share of the step waits for the network, and where."""
    record = plan.predicted
    exposed = record.breakdown_seconds["exposed communication"]
    if not exposed:
        return "no communication is exposed"
    share = exposed / (record.step_seconds or math.inf)
    if share < 0.001:
        return f"{show_seconds(exposed)} of communication is exposed, under 0.1% of the step"
    axes = dearest_axes(record)
    on = lay_mesh(plan.system, plan.mesh.layout).placement(axes)
    amount = f"{show_seconds(exposed)} of communication is exposed, {show_percent(share)}"
    return f"{amount}, most over {'*'.join(axes)}: {on}"


def _bubble(plan: Plan) -> str:
    """What a pipeline waits, and the fraction that says why."""
    bubble = plan.predicted.breakdown_seconds.get("pipeline bubble", 0.0)
    if not bubble:
        return ""
    strategy, stages = plan.strategy, plan.mesh.pp
    virtual = f" / {strategy.virtual_stages}" if strategy.virtual_stages > 1 else ""
    share = show_percent(bubble / (plan.predicted.step_seconds or math.inf))
    parts = f"{strategy.num_microbatches} microbatch{'es' if strategy.num_microbatches > 1 else ''}"
    return f"the pipeline's bubble is {show_seconds(bubble)}, {share}: {stages} - 1 stages{virtual} for {parts}"


def _memory(plan: Plan) -> str:
    """What of the memory is used, and for what most."""
    terms = {name: size for name, size in plan.predicted.memory_bytes.items() if name != "peak"}
    most, peak = max(terms, key=terms.__getitem__), plan.predicted.memory_bytes["peak"]
    share = show_percent(peak / plan.system.usable_bytes)
    return f"memory is {share} full; most of it is {most}, {show_bytes(terms[most])}"


def reason(plan: Plan, best: Plan) -> str:
    """The one reason why a plan loses against the best, in a few words with its numbers."""
    record = plan.predicted
    if not record.fits:
        return f"wants {show_bytes(record.memory_bytes['peak'])}"
    spent, least = record.breakdown_seconds, best.predicted.breakdown_seconds
    gaps = {name: time - least.get(name, 0.0) for name, time in spent.items()}
    slowest = max(gaps, key=gaps.__getitem__)
    if plan == best or gaps[slowest] <= 0:
        return "-" if plan == best else "as fast, with less memory left"
    if slowest == "recompute" and plan.workload.remat != best.workload.remat:
        return f"needs remat {plan.workload.remat}: +{show_seconds(gaps[slowest])}"
    if slowest != "exposed communication":
        return f"{slowest} +{show_seconds(gaps[slowest])}"
    return f"{'*'.join(_dearer_axes(record, best.predicted))} communication: +{show_seconds(gaps[slowest])}"


def dearest_axes(record: Record) -> tuple[str, ...]:
    """The axes whose collectives are exposed longest."""
    times = dict(_exposed_by_axes(record))
    return max(times, key=times.__getitem__)


def _dearer_axes(record: Record, best: Record) -> tuple[str, ...]:
    """The axes whose collectives are exposed longest beyond those of the best."""
    theirs = dict(_exposed_by_axes(best))
    times = {axes: seconds - theirs.get(axes, 0.0) for axes, seconds in _exposed_by_axes(record)}
    return max(times, key=times.__getitem__)


def _exposed_by_axes(record: Record) -> Iterator[tuple[tuple[str, ...], float]]:
    """What is exposed over each set of axes."""
    for axes in {move.axes for move in record.collectives}:
        yield axes, sum(move.exposed_seconds or 0.0 for move in record.collectives if move.axes == axes)
