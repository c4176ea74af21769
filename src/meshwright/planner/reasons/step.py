"""What binds the best plan: tokens per device, degree of tp, waiting, memory."""

from __future__ import annotations

import math
from dataclasses import dataclass

from meshwright.cost import gather_bytes_per_second, model_flops, network_intensity
from meshwright.hardware import lay_mesh
from meshwright.planner.plan import Plan
from meshwright.planner.reasons.fact import Fact
from meshwright.planner.reasons.gap import dearest_axes
from meshwright.step import token_axes
from meshwright.units import show_bytes, show_percent, show_seconds

ATTENTION = {"scores": "attention scores through memory", "flash": "a fused attention kernel"}
"""The kinds of attention in words; others go by their own name."""


CAUSAL_SHARE = 0.2
"""The share of MFU that scores behind the mask have from which it is worth a word."""


WAITING_SHARE = 0.05
"""The share of a step from which waiting for the network or the pipeline is part of the answer."""


@dataclass(frozen=True)
class TokensPerDevice(Fact):
    """The tokens of a device beside those that hide gathers of weights and sums of gradients over some axes.

    axes: empty where no axis gathers or sums. wanted: tokens from which all of it is hidden. is_of_microbatch: the
    tokens are those of one microbatch, as each gathers or sums anew.
    """

    tokens: int
    axes: tuple[str, ...]
    wanted: int
    is_of_microbatch: bool = False

    @property
    def is_hidden(self) -> bool:
        """Whether the tokens hide it."""
        return self.tokens >= self.wanted

    def __str__(self) -> str:
        if not self.axes:
            return f"{self.tokens:,} tokens a device, and no axis gathers weights or sums gradients"
        verb = "hide" if self.is_hidden else "do not hide"
        over = "*".join(self.axes)
        each = "a device and microbatch" if self.is_of_microbatch else "a device"
        return f"{self.tokens:,} tokens {each} {verb} weights and gradients over {over}, which want {self.wanted:,}"


@dataclass(frozen=True)
class TensorDegree(Fact):
    """The degree of tp beside mlp / alpha, up to which its products take longer than its collectives.

    alpha: flops a network byte that the hardware wants. placement: the links that tp runs over.
    """

    degree: int
    mlp: int
    alpha: float
    placement: str

    @property
    def limit(self) -> float:
        """The degree from which collectives take longer."""
        return self.mlp / self.alpha

    def __str__(self) -> str:
        side = "below" if self.degree < self.limit else "not below"
        limit = f"{self.mlp:,} / {self.alpha:,.0f} = {self.limit:.3g}"
        return f"tp={self.degree} is {side} mlp / alpha = {limit}, on {self.placement}"


@dataclass(frozen=True)
class ExposedCommunication(Fact):
    """The time of a step that waits for the network, most of it over some axes; no axes where none is exposed."""

    seconds: float
    share: float
    axes: tuple[str, ...]
    placement: str

    def __str__(self) -> str:
        if not self.axes:
            return "no communication is exposed"
        if self.share < 0.001:
            return f"{show_seconds(self.seconds)} of communication is exposed, under 0.1% of the step"
        amount = f"{show_seconds(self.seconds)} of communication is exposed, {show_percent(self.share)}"
        return f"{amount}, most over {'*'.join(self.axes)}: {self.placement}"


@dataclass(frozen=True)
class PipelineBubble(Fact):
    """The time that stages of a pipeline wait for their first microbatch and the last gradient."""

    seconds: float
    share: float
    stages: int
    virtual_stages: int
    num_microbatches: int

    def __str__(self) -> str:
        virtual = f" / {self.virtual_stages}" if self.virtual_stages > 1 else ""
        parts = f"{self.num_microbatches} microbatch{'es' if self.num_microbatches > 1 else ''}"
        amount = f"{show_seconds(self.seconds)}, {show_percent(self.share)}"
        return f"the pipeline's bubble is {amount}: {self.stages} - 1 stages{virtual} for {parts}"


@dataclass(frozen=True)
class MemoryUse(Fact):
    """How full the memory of a device is, the headroom that is kept of it, and the largest term."""

    share: float
    headroom: float
    largest: str
    largest_bytes: int

    def __str__(self) -> str:
        kept = f" ({show_percent(self.headroom)} headroom for the error of the prediction)" if self.headroom else ""
        most = f"most of it is {self.largest}, {show_bytes(self.largest_bytes)}"
        return f"memory is {show_percent(self.share)} full{kept}; {most}"


@dataclass(frozen=True)
class CausalFlops(Fact):
    """MFU where attention counts only the scores that a causal mask keeps, beside MFU, which counts all of them."""

    mfu: float
    causal_mfu: float

    def __str__(self) -> str:
        return (
            f"MFU {show_percent(self.mfu)} counts all scores of attention; of those that the causal mask keeps, which"
            f" are computed, it is {show_percent(self.causal_mfu)}"
        )


WhyFact = TokensPerDevice | TensorDegree | ExposedCommunication | PipelineBubble | MemoryUse | CausalFlops


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
    if plan.mesh.tp > 1 and strategy.collective_matmul:
        parts.append("collective matmul over tp")
    parts += [ATTENTION.get(strategy.attention, f"{strategy.attention} attention"), strategy.optimizer]
    return " · ".join(parts)


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
