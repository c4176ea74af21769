"""What limits the best plan: tokens per device, degree of tp, waiting, memory."""

from __future__ import annotations

import math
from dataclasses import dataclass

from meshwright.description.hardware.fabric import lay_mesh
from meshwright.description.step.rules import token_axes
from meshwright.planning.cost.flops import model_flops
from meshwright.planning.cost.rates.collective import gather_bytes_per_second
from meshwright.planning.cost.roofline import network_intensity
from meshwright.planning.plan import Plan
from meshwright.planning.why.fact import Fact
from meshwright.planning.why.gap import dearest_axes
from meshwright.units import show_bytes, show_percent, show_seconds

ATTENTION = {"scores": "attention scores through memory", "flash": "a fused attention kernel"}
"""Descriptions of kinds of attention; other kinds are shown by name."""

CAUSAL_SHARE = 0.2
"""The share of the MFU from which masked scores are mentioned."""

WAITING_SHARE = 0.05
"""The share of a step from which waiting for the network or the pipeline is mentioned in the short answer."""


@dataclass(frozen=True)
class TokensPerDevice(Fact):
    """Tokens per device, compared with the number that hides weight gathers and gradient reductions."""

    tokens: int
    axes: tuple[str, ...]
    """Axes over which weights are gathered or gradients reduced; empty if there are none."""
    wanted: int
    """Tokens from which these collectives are hidden."""
    is_of_microbatch: bool = False
    """Whether every microbatch gathers or reduces; then `tokens` is per microbatch."""

    @property
    def is_hidden(self) -> bool:
        """Whether there are enough tokens."""
        return self.tokens >= self.wanted

    def __str__(self) -> str:
        if not self.axes:
            return f"{self.tokens:,} tokens per device, and no axis gathers weights or sums gradients"
        per = "per device and microbatch" if self.is_of_microbatch else "per device"
        needs = f"{'*'.join(self.axes)} needs {self.wanted:,} to hide its collectives"
        return f"{self.tokens:,} tokens {per}{';' if self.is_hidden else ' are too few:'} {needs}"


@dataclass(frozen=True)
class TensorDegree(Fact):
    """The degree of tp, compared with the limit below which matmuls take longer than collectives."""

    degree: int
    mlp: int
    alpha: float
    """Flops of a device in the time of one network byte."""
    placement: str
    """The links that tp runs over."""

    @property
    def limit(self) -> float:
        """The degree from which collectives take longer than matmuls: mlp / alpha."""
        return self.mlp / self.alpha

    def __str__(self) -> str:
        side = "up to" if self.degree < self.limit else "beyond"
        limit = f"mlp {self.mlp:,} / {self.alpha:,.0f} flops per byte"
        verb = "stays" if self.degree < self.limit else "is not"
        return f"tp={self.degree} {verb} compute bound, {side} tp={self.limit:.3g} ({limit}), on {self.placement}"


@dataclass(frozen=True)
class ExposedCommunication(Fact):
    """Time of a step that is spent waiting for the network."""

    seconds: float
    share: float
    """Share of the step."""
    axes: tuple[str, ...]
    """Axes with the longest wait; empty if no communication is exposed."""
    placement: str
    """The links that these axes run over."""

    def __str__(self) -> str:
        if not self.axes:
            return "no communication is exposed"
        if self.share < 0.001:
            return f"{show_seconds(self.seconds)} of communication is exposed, under 0.1% of the step"
        amount = f"{show_seconds(self.seconds)} of communication is exposed, {show_percent(self.share)}"
        return f"{amount}, most over {'*'.join(self.axes)}: {self.placement}"


@dataclass(frozen=True)
class PipelineBubble(Fact):
    """Time that pipeline stages are idle at the beginning and the end of a step."""

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
    """How full the memory of a device is, and what takes most of it."""

    share: float
    headroom: float
    """Share kept free for the error of the prediction."""
    largest: str
    """Name of the largest term."""
    largest_bytes: int

    def __str__(self) -> str:
        kept = f" ({show_percent(self.headroom)} headroom for the error of the prediction)" if self.headroom else ""
        most = f"most of it is {self.largest}, {show_bytes(self.largest_bytes)}"
        return f"memory is {show_percent(self.share)} full{kept}; {most}"


@dataclass(frozen=True)
class CausalFlops(Fact):
    """MFU with all attention scores, and with the unmasked ones only."""

    mfu: float
    causal_mfu: float

    def __str__(self) -> str:
        return (
            f"MFU is {show_percent(self.mfu)} with all attention scores counted, {show_percent(self.causal_mfu)} with"
            f" those that are computed: the causal mask hides the rest"
        )


WhyFact = TokensPerDevice | TensorDegree | ExposedCommunication | PipelineBubble | MemoryUse | CausalFlops


def how(plan: Plan) -> str:
    """Return a plan's settings as text: remat, microbatches, schedule, ZeRO stage, attention, optimizer."""
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
    """Return the facts that decide the step time of a plan."""
    found = (_tokens(plan), _tensor(plan), _exposed(plan), _bubble(plan), _memory(plan), _causal(plan))
    return tuple(fact for fact in found if fact is not None)


def answer(plan: Plan) -> tuple[WhyFact, ...]:
    """Return the most important facts of `why`: tokens, memory, and long waits for the network or the pipeline."""
    return tuple(
        fact
        for fact in why(plan)
        if isinstance(fact, TokensPerDevice | MemoryUse)
        or (isinstance(fact, ExposedCommunication | PipelineBubble) and fact.share >= WAITING_SHARE)
    )


def computed_mfu(plan: Plan) -> float | None:
    """Return the MFU without masked attention scores, if they are a large part.

    Fused kernels skip masked scores. The usual MFU counts them, and can exceed 100% for long sequences. None on
    simulated CPU devices: they share the cores of one machine and have no peak.
    """
    causal = _causal(plan)
    return causal.causal_mfu if causal and plan.predicted.shown_mfu else plan.predicted.shown_mfu


def wanted_tokens(plan: Plan, axes: tuple[str, ...]) -> int:
    """Return the tokens per device that hide gathers and gradient reductions over `axes`: C / W, times E / k for MoE.

    All E experts are gathered, k of them work on each token (scaling book, chapters training and gpus, data
    parallelism). Experts that ep splits are not gathered.
    """
    wanted, _ = _alpha(plan, axes)
    experts = plan.workload.model.experts
    spread = max(1.0, experts.count / experts.num_active / plan.mesh.ep) if experts else 1.0
    return math.ceil(wanted * spread)


def data_axes(plan: Plan) -> tuple[str, ...]:
    """Return the axes with more than one device that gather weights or reduce gradients."""
    return tuple(axis for axis in token_axes() if axis != "ep" and plan.mesh.degree(axis) > 1)


def local_tokens(plan: Plan) -> int:
    """Return the tokens that a device processes between two weight gathers or gradient reductions.

    One microbatch with ZeRO-2 and ZeRO-3 over fsdp or sp, else the whole step.
    """
    parts = plan.strategy.num_microbatches if _is_for_each_microbatch(plan) else 1
    return plan.workload.tokens // plan.mesh.degree(token_axes()) // parts


def _is_for_each_microbatch(plan: Plan) -> bool:
    """Whether weights are gathered or gradients reduced in every microbatch."""
    strategy = plan.strategy
    return strategy.num_microbatches > 1 and strategy.zero_stage >= 2 and any(axis != "dp" for axis in data_axes(plan))


def _tokens(plan: Plan) -> TokensPerDevice:
    axes = data_axes(plan)
    wanted = wanted_tokens(plan, axes) if axes else 0
    return TokensPerDevice(local_tokens(plan), axes, wanted, is_of_microbatch=_is_for_each_microbatch(plan))


def _tensor(plan: Plan) -> TensorDegree | None:
    if plan.mesh.tp == 1:
        return None
    alpha, placement = _alpha(plan, ("tp",))
    return TensorDegree(plan.mesh.tp, plan.workload.model.mlp, alpha, placement)


def _alpha(plan: Plan, axes: tuple[str, ...]) -> tuple[float, str]:
    """Return the flops of a device in the time of one gathered byte, and the links that `axes` run over."""
    placement = lay_mesh(plan.system, plan.mesh.layout).placement(axes)
    rate = gather_bytes_per_second(placement)
    return network_intensity(plan.system, rate, dtype=plan.workload.compute_dtype), str(placement)


def _exposed(plan: Plan) -> ExposedCommunication:
    record = plan.predicted
    seconds = record.breakdown_seconds["exposed communication"]
    if not seconds:
        return ExposedCommunication(0.0, 0.0, (), "")
    axes = dearest_axes(record)
    placement = lay_mesh(plan.system, plan.mesh.layout).placement(axes)
    return ExposedCommunication(seconds, seconds / (record.step_seconds or math.inf), axes, str(placement))


def _bubble(plan: Plan) -> PipelineBubble | None:
    seconds = plan.predicted.breakdown_seconds.get("pipeline bubble", 0.0)
    if not seconds:
        return None
    strategy, share = plan.strategy, seconds / (plan.predicted.step_seconds or math.inf)
    return PipelineBubble(seconds, share, plan.mesh.pp, strategy.virtual_stages, strategy.num_microbatches)


def _memory(plan: Plan) -> MemoryUse:
    terms = {name: size for name, size in plan.predicted.memory_bytes.items() if name != "peak"}
    largest = max(terms, key=terms.__getitem__)
    share = plan.predicted.memory_bytes["peak"] / plan.system.usable_bytes
    return MemoryUse(share, plan.memory_headroom or 0.0, largest, terms[largest])


def _causal(plan: Plan) -> CausalFlops | None:
    """Return the MFU without masked scores, if these are a large part of the usual MFU."""
    mfu = plan.predicted.mfu or 0.0
    causal = mfu * model_flops(plan.workload, is_causal=True) / model_flops(plan.workload)
    return CausalFlops(mfu, causal) if mfu - causal > CAUSAL_SHARE * mfu else None
