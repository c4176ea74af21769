"""What limits the best plan: tokens per device, degree of tp, exposed communication, pipeline bubble, memory."""

from __future__ import annotations

import math
from dataclasses import dataclass

from meshwright.description.hardware.fabric import lay_mesh
from meshwright.description.step.rules import token_axes
from meshwright.planning.cost.flops import model_flops
from meshwright.planning.cost.rates.collective import gather_bytes_per_second
from meshwright.planning.cost.rates.collective_time import stops_ops
from meshwright.planning.cost.roofline import network_intensity
from meshwright.planning.plan import Plan
from meshwright.planning.why.fact import Fact
from meshwright.planning.why.gap import dearest_axes
from meshwright.units import show_bytes, show_percent, show_seconds

ATTENTION = {"scores": "attention scores through memory", "flash": "a fused attention kernel"}
"""Descriptions of attention implementations; others are shown by name."""

CAUSAL_SHARE = 0.2
"""Masked scores are mentioned if they are more than this fraction of the MFU."""

WAITING_SHARE = 0.05
"""The fraction of a step from which `answer` includes exposed communication or a pipeline bubble."""

SUMMED_SHARE = 0.01
"""The same for exposed collectives that the compiler runs as all-reduces, which another mesh may avoid."""


@dataclass(frozen=True)
class TokensPerDevice(Fact):
    """Tokens per device, compared with the number from which weight gathers and gradient reductions are hidden."""

    tokens: int
    axes: tuple[str, ...]
    """Mesh axes over which weights are gathered or gradients reduced; empty if there are none."""
    wanted: int
    """Number of tokens per device from which these collectives are hidden."""
    is_of_microbatch: bool = False
    """Whether every microbatch has such collectives; then `tokens` is per microbatch."""

    @property
    def is_hidden(self) -> bool:
        """Whether there are enough tokens to hide the collectives."""
        return self.tokens >= self.wanted

    def __str__(self) -> str:
        if not self.axes:
            return f"{self.tokens:,} tokens per device, and no axis gathers weights or sums gradients"
        per = "per device and microbatch" if self.is_of_microbatch else "per device"
        needs = f"{'*'.join(self.axes)} needs {self.wanted:,} to hide its collectives"
        return f"{self.tokens:,} tokens {per}{';' if self.is_hidden else ' are too few:'} {needs}"


@dataclass(frozen=True)
class TensorDegree(Fact):
    """The degree of tp, compared with the degree up to which matmuls take longer than tp's collectives."""

    degree: int
    mlp: int
    """Width of the model's MLP."""
    alpha: float
    """Flops that a device executes in the time of one byte of a collective over tp."""
    placement: str
    """The links of tp's collectives."""

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
    """Time per step in which a device waits for collectives."""

    seconds: float
    share: float
    """`seconds` as a fraction of the step."""
    axes: tuple[str, ...]
    """Mesh axes with the longest exposed communication; empty if no communication is exposed."""
    placement: str
    """The links of collectives over these axes."""
    summed: tuple[str, ...] = ()
    """Kinds of collectives over these axes that the compiler runs as all-reduces (`collective_time.stops_ops`)."""

    @property
    def is_long(self) -> bool:
        """Whether the time is long enough for the answer."""
        return self.share >= (SUMMED_SHARE if self.summed else WAITING_SHARE)

    def __str__(self) -> str:
        if not self.axes:
            return "no communication is exposed"
        if self.share < 0.001:
            return f"{show_seconds(self.seconds)} of communication is exposed, under 0.1% of the step"
        amount = f"{show_seconds(self.seconds)} of communication is exposed, {show_percent(self.share)}"
        text = f"{amount}, most over {'*'.join(self.axes)}: {self.placement}"
        if not self.summed:
            return text
        kinds = " and ".join(f"{kind}s" for kind in self.summed)
        return f"{text}; its {kinds} are over all chips of a slice, and run as all-reduces that nothing overlaps"


@dataclass(frozen=True)
class PipelineBubble(Fact):
    """Time per step in which a pipeline stage is idle, at the start and the end; share: the fraction of the step."""

    seconds: float
    share: float
    stages: int
    virtual_stages: int
    num_microbatches: int

    @property
    def is_long(self) -> bool:
        """Whether the time is long enough for the answer."""
        return self.share >= WAITING_SHARE

    def __str__(self) -> str:
        virtual = f" / {self.virtual_stages}" if self.virtual_stages > 1 else ""
        parts = f"{self.num_microbatches} microbatch{'es' if self.num_microbatches > 1 else ''}"
        amount = f"{show_seconds(self.seconds)}, {show_percent(self.share)}"
        return f"the pipeline's bubble is {amount}: {self.stages} - 1 stages{virtual} for {parts}"


@dataclass(frozen=True)
class MemoryUse(Fact):
    """How full the memory of a device is, and its largest term."""

    share: float
    """Peak memory as a fraction of the usable memory."""
    headroom: float
    """Fraction of the memory that is kept free for the error of the prediction."""
    largest: str
    """Name of the largest term, such as `activations`."""
    largest_bytes: int

    def __str__(self) -> str:
        kept = f" ({show_percent(self.headroom)} headroom for the error of the prediction)" if self.headroom else ""
        most = f"most of it is {self.largest}, {show_bytes(self.largest_bytes)}"
        return f"memory is {show_percent(self.share)} full{kept}; {most}"


@dataclass(frozen=True)
class CausalFlops(Fact):
    """MFU that counts all attention scores, and MFU that counts only unmasked scores."""

    mfu: float
    causal_mfu: float

    def __str__(self) -> str:
        return (
            f"MFU is {show_percent(self.mfu)} with all attention scores counted, {show_percent(self.causal_mfu)} with"
            f" those that are computed: the causal mask hides the rest"
        )


WhyFact = TokensPerDevice | TensorDegree | ExposedCommunication | PipelineBubble | MemoryUse | CausalFlops


def how(plan: Plan) -> str:
    """Return the settings of a plan as text: remat, microbatches, schedule, ZeRO stage, dtypes, optimizer."""
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
    if strategy.matmul_dtype:
        what = "linear layers and experts" if plan.workload.model.experts else "linear layers"
        gradients = "both gradients" if strategy.matmul_dtype == "fp8" else "gradients of inputs"
        parts.append(f"{strategy.matmul_dtype} in {what}, forward and {gradients}")
    parts += [ATTENTION.get(strategy.attention, f"{strategy.attention} attention"), strategy.optimizer]
    return " · ".join(parts)


def why(plan: Plan) -> tuple[WhyFact, ...]:
    """Return the facts that determine step time and memory of a plan."""
    found = (_tokens(plan), _tensor(plan), _exposed(plan), _bubble(plan), _memory(plan), _causal(plan))
    return tuple(fact for fact in found if fact is not None)


def answer(plan: Plan) -> tuple[WhyFact, ...]:
    """Return the most important facts of `why`: tokens, memory, and long exposed communication or pipeline bubble."""
    return tuple(
        fact
        for fact in why(plan)
        if isinstance(fact, TokensPerDevice | MemoryUse)
        or (isinstance(fact, ExposedCommunication | PipelineBubble) and fact.is_long)
    )


def computed_mfu(plan: Plan) -> float | None:
    """Return the MFU that counts only unmasked attention scores, if masked ones are a large part; else the usual MFU.

    The usual MFU counts masked scores, which fused kernels skip, so it can exceed 100% for long sequences. None on
    simulated CPU devices, which share the cores of one machine and have no peak.
    """
    causal = _causal(plan)
    return causal.causal_mfu if causal and plan.predicted.shown_mfu else plan.predicted.shown_mfu


def wanted_tokens(plan: Plan, axes: tuple[str, ...]) -> int:
    """Return the tokens per device from which weight gathers and gradient reductions over `axes` are hidden.

    They are C / W: the flops of a device in the time of one byte of a collective (scaling book, chapters training and
    gpus, data parallelism). For MoE models they are E / k times as many, because all E experts of a device (of the
    model, divided by ep) are gathered and k of them process each token.
    """
    wanted, _ = _alpha(plan, axes)
    experts = plan.workload.model.experts
    spread = max(1.0, experts.count / experts.num_active / plan.mesh.ep) if experts else 1.0
    return math.ceil(wanted * spread)


def data_axes(plan: Plan) -> tuple[str, ...]:
    """Return the mesh axes larger than 1 over which weights are gathered or gradients reduced."""
    return tuple(axis for axis in token_axes() if axis != "ep" and plan.mesh.degree(axis) > 1)


def local_tokens(plan: Plan) -> int:
    """Return the tokens that a device processes between two weight gathers or gradient reductions.

    They are those of one microbatch with ZeRO-2 and ZeRO-3 over fsdp or sp, else those of the whole step.
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
    """Return (flops of a device in the time of one gathered byte, the links of collectives over `axes` as text)."""
    placement = lay_mesh(plan.system, plan.mesh.layout).placement(axes)
    rate = gather_bytes_per_second(placement)
    return network_intensity(plan.system, rate, dtype=plan.workload.compute_dtype), str(placement)


def _exposed(plan: Plan) -> ExposedCommunication:
    record = plan.predicted
    seconds = record.breakdown_seconds["exposed communication"]
    if not seconds:
        return ExposedCommunication(0.0, 0.0, (), "")
    axes = dearest_axes(record)
    layout = lay_mesh(plan.system, plan.mesh.layout)
    summed = {move.kind for move in record.own_collectives if move.axes == axes and stops_ops(move, layout)}
    share, placement = seconds / (record.step_seconds or math.inf), str(layout.placement(axes))
    return ExposedCommunication(seconds, share, axes, placement, tuple(sorted(summed)))


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
    """Return the MFU with and without masked scores; None if masked scores are a small part of the usual MFU."""
    mfu = plan.predicted.mfu or 0.0
    causal = mfu * model_flops(plan.workload, is_causal=True) / model_flops(plan.workload)
    return CausalFlops(mfu, causal) if mfu - causal > CAUSAL_SHARE * mfu else None
