"""Why: what binds the best plan, and the one reason for which each of the others loses, as facts."""

from __future__ import annotations

import math
from collections.abc import Iterator

from meshwright.cost import gather_bytes_per_second, model_flops, network_intensity
from meshwright.hardware import lay_mesh
from meshwright.planner.facts import (
    CausalFlops,
    ExposedCommunication,
    Gap,
    GapKind,
    MemoryUse,
    PipelineBubble,
    TensorDegree,
    TokensPerDevice,
    TrainingRun,
    WhyFact,
)
from meshwright.planner.plan import Plan
from meshwright.planner.ties import num_parts, ties
from meshwright.record import Record
from meshwright.step import token_axes

CAUSAL_SHARE = 0.2
"""The share of MFU that scores behind the mask have from which it is worth a word."""


WAITING_SHARE = 0.05
"""The share of a step from which waiting for the network or the pipeline is part of the answer."""


def why(plan: Plan) -> tuple[WhyFact, ...]:
    """What decides the step of a plan, with the numbers."""
    found = (_tokens(plan), _tensor(plan), _exposed(plan), _bubble(plan), _memory(plan), _causal(plan))
    return tuple(fact for fact in found if fact is not None)


def answer(plan: Plan) -> tuple[WhyFact, ...]:
    """The facts of `why` that decide: tokens, memory, and the wait for the network or the pipeline where it is long."""
    return tuple(
        fact
        for fact in why(plan)
        if isinstance(fact, TokensPerDevice | MemoryUse)
        or (isinstance(fact, ExposedCommunication | PipelineBubble) and fact.share >= WAITING_SHARE)
    )


def computed_mfu(plan: Plan) -> float | None:
    """The model flops utilisation of what is computed: without the scores that a causal mask hides, where they count.

    A fused kernel skips them, so that with long sequences the usual MFU, which counts them all, can be over 100%.
    None on simulated CPU devices, which share the cores of one machine and have no peak of their own.
    """
    causal = _causal(plan)
    return causal.causal_mfu if causal and plan.predicted.shown_mfu else plan.predicted.shown_mfu


def training_run(plan: Plan, tokens: int, price: float | None = None) -> TrainingRun:
    """What training on so many tokens takes at the predicted speed, without restarts and evaluation.

    price: of a chip for an hour, in any currency.
    """
    seconds = tokens / (plan.predicted.tokens_per_second or math.inf)
    chip_hours = seconds / 3600 * plan.system.num_chips
    return TrainingRun(tokens, seconds, chip_hours, None if price is None else price * chip_hours)


def wanted_tokens(plan: Plan, axes: tuple[str, ...]) -> int:
    """The tokens a device that hide the weights and gradients which some axes gather and sum: C / W, times E / k.

    Of a mixture of experts all E are gathered and k work on a token (scaling book, training and gpus: data
    parallelism). Those that ep splits need not be gathered.
    """
    wanted, _ = _alpha(plan, axes)
    experts = plan.workload.model.experts
    spread = max(1.0, experts.count / experts.num_active / plan.mesh.ep) if experts else 1.0
    return math.ceil(wanted * spread)


def data_axes(plan: Plan) -> tuple[str, ...]:
    """The axes over which weights are gathered or gradients summed, of more than one device."""
    return tuple(axis for axis in token_axes() if axis != "ep" and plan.mesh.degree(axis) > 1)


def local_tokens(plan: Plan) -> int:
    """The tokens that one device works on for each time that weights are gathered or gradients summed.

    Of a microbatch where each gathers or sums over fsdp or sp (ZeRO-2 and 3), else of the step.
    """
    parts = plan.strategy.num_microbatches if _is_for_each_microbatch(plan) else 1
    return plan.workload.tokens // plan.mesh.degree(token_axes()) // parts


def _is_for_each_microbatch(plan: Plan) -> bool:
    """Whether each of several microbatches gathers weights or sums gradients."""
    strategy = plan.strategy
    return strategy.num_microbatches > 1 and strategy.zero_stage >= 2 and any(axis != "dp" for axis in data_axes(plan))


def gap_to(plan: Plan, best: Plan) -> Gap:
    """The largest difference of a plan from the best."""
    record = plan.predicted
    if not record.fits:
        return Gap(GapKind.MEMORY, peak_bytes=record.memory_bytes["peak"])
    if plan == best:
        return Gap(GapKind.BEST)
    spent, least = record.breakdown_seconds, best.predicted.breakdown_seconds
    gaps = {name: time - least.get(name, 0.0) for name, time in spent.items()}
    slowest = max(gaps, key=gaps.__getitem__)
    seconds = gaps[slowest]
    if (saved := (best.predicted.step_seconds or 0.0) - (record.step_seconds or 0.0)) > 0:
        kind = GapKind.TIED if ties(best, plan) else GapKind.FASTER
        return Gap(kind, seconds=saved, parts=num_parts(plan) - num_parts(best))
    if seconds <= 0:
        return Gap(GapKind.EQUAL)
    if slowest == "recompute" and plan.workload.remat != best.workload.remat:
        return Gap(GapKind.RECOMPUTE, slowest, seconds, remat=plan.workload.remat)
    if slowest == "exposed communication":
        return Gap(GapKind.COMMUNICATION, slowest, seconds, axes=_dearer_axes(record, best.predicted))
    return Gap(GapKind.TERM, slowest, seconds)


def dearest_axes(record: Record) -> tuple[str, ...]:
    """The axes whose collectives are exposed longest."""
    times = dict(_exposed_by_axes(record))
    return max(times, key=times.__getitem__)


def _tokens(plan: Plan) -> TokensPerDevice:
    """The tokens that a device has beside those that hide its weights and gradients."""
    axes = data_axes(plan)
    wanted = wanted_tokens(plan, axes) if axes else 0
    return TokensPerDevice(local_tokens(plan), axes, wanted, is_of_microbatch=_is_for_each_microbatch(plan))


def _tensor(plan: Plan) -> TensorDegree | None:
    """The degree of tp beside the one up to which its products take longer than its collectives."""
    if plan.mesh.tp == 1:
        return None
    alpha, placement = _alpha(plan, ("tp",))
    return TensorDegree(plan.mesh.tp, plan.workload.model.mlp, alpha, placement)


def _alpha(plan: Plan, axes: tuple[str, ...]) -> tuple[float, str]:
    """The flops that a device does in the time of a byte gathered over some axes, and the links that these run over."""
    placement = lay_mesh(plan.system, plan.mesh.layout).placement(axes)
    rate = gather_bytes_per_second(placement)
    return network_intensity(plan.system, rate, dtype=plan.workload.compute_dtype), str(placement)


def _exposed(plan: Plan) -> ExposedCommunication:
    """What share of the step waits for the network, and where."""
    record = plan.predicted
    seconds = record.breakdown_seconds["exposed communication"]
    if not seconds:
        return ExposedCommunication(0.0, 0.0, (), "")
    axes = dearest_axes(record)
    placement = lay_mesh(plan.system, plan.mesh.layout).placement(axes)
    return ExposedCommunication(seconds, seconds / (record.step_seconds or math.inf), axes, str(placement))


def _bubble(plan: Plan) -> PipelineBubble | None:
    """What a pipeline waits."""
    seconds = plan.predicted.breakdown_seconds.get("pipeline bubble", 0.0)
    if not seconds:
        return None
    strategy, share = plan.strategy, seconds / (plan.predicted.step_seconds or math.inf)
    return PipelineBubble(seconds, share, plan.mesh.pp, strategy.virtual_stages, strategy.num_microbatches)


def _memory(plan: Plan) -> MemoryUse:
    """What of the memory is used, and for what most."""
    terms = {name: size for name, size in plan.predicted.memory_bytes.items() if name != "peak"}
    largest = max(terms, key=terms.__getitem__)
    share = plan.predicted.memory_bytes["peak"] / plan.system.usable_bytes
    return MemoryUse(share, plan.memory_headroom or 0.0, largest, terms[largest])


def _causal(plan: Plan) -> CausalFlops | None:
    """MFU of the scores that the mask keeps, where those that it hides are a large part of what MFU counts."""
    mfu = plan.predicted.mfu or 0.0
    causal = mfu * model_flops(plan.workload, is_causal=True) / model_flops(plan.workload)
    return CausalFlops(mfu, causal) if mfu - causal > CAUSAL_SHARE * mfu else None


def _dearer_axes(record: Record, best: Record) -> tuple[str, ...]:
    """The axes whose collectives are exposed longest beyond those of the best."""
    theirs = dict(_exposed_by_axes(best))
    times = {axes: seconds - theirs.get(axes, 0.0) for axes, seconds in _exposed_by_axes(record)}
    return max(times, key=times.__getitem__)


def _exposed_by_axes(record: Record) -> Iterator[tuple[tuple[str, ...], float]]:
    """What is exposed over each set of axes."""
    moves = record.own_collectives
    for axes in {move.axes for move in moves}:
        yield axes, sum(move.exposed_seconds or 0.0 for move in moves if move.axes == axes)
