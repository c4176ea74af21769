"""Facts of plans to train as text: the one place that puts their numbers into words."""

from __future__ import annotations

from dataclasses import asdict
from functools import singledispatch
from typing import Any

from meshwright.planner.facts import (
    CausalFlops,
    DataParallelLimit,
    ExposedCommunication,
    Exposure,
    Fact,
    FsdpFirst,
    Gap,
    GapKind,
    ImageActivations,
    ImageCommunication,
    ImageStates,
    LongerSequences,
    MemoryUse,
    MoreChips,
    OtherBatch,
    PipelineBubble,
    ReplicaInstead,
    SequenceLimit,
    SequencesPerDevice,
    StateSize,
    TensorDegree,
    TokensPerDevice,
    TrainingRun,
    Turn,
)
from meshwright.planner.fit import Change
from meshwright.planner.plan import Plan
from meshwright.units import show_bytes, show_count, show_percent, show_rate, show_seconds

ATTENTION = {"scores": "attention scores through memory", "flash": "a fused attention kernel"}
"""The kinds of attention in words; others go by their own name."""

ADVICE = (
    "it fits in one device: data parallelism is enough",
    "up to 8x wants one model axis",
    "8x to 64x wants two model axes",
    "beyond 64x wants three model axes, a pipeline among them",
)
"""The rule of thumb for a model of so many model axes."""


def fact_data(fact: Any) -> dict[str, Any]:
    """A fact as plain data: its kind, its numbers, and the sentence."""
    name = type(fact).__name__
    kind = "".join(f"_{letter.lower()}" if letter.isupper() else letter for letter in name).removeprefix("_")
    return {"fact": kind, **asdict(fact), "text": say(fact)}


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


@singledispatch
def say(fact: Fact | Change) -> str:
    """A fact as a sentence."""
    raise TypeError(f"no sentence for {fact!r}")


@say.register
def _(fact: TokensPerDevice) -> str:
    if not fact.axes:
        return f"{fact.tokens:,} tokens a device, and no axis gathers weights or sums gradients"
    verb = "hide" if fact.is_hidden else "do not hide"
    over = "*".join(fact.axes)
    each = "a device and microbatch" if fact.is_of_microbatch else "a device"
    return f"{fact.tokens:,} tokens {each} {verb} weights and gradients over {over}, which want {fact.wanted:,}"


@say.register
def _(fact: TensorDegree) -> str:
    side = "below" if fact.degree < fact.limit else "not below"
    limit = f"{fact.mlp:,} / {fact.alpha:,.0f} = {fact.limit:.3g}"
    return f"tp={fact.degree} is {side} mlp / alpha = {limit}, on {fact.placement}"


@say.register
def _(fact: ExposedCommunication) -> str:
    if not fact.axes:
        return "no communication is exposed"
    if fact.share < 0.001:
        return f"{show_seconds(fact.seconds)} of communication is exposed, under 0.1% of the step"
    amount = f"{show_seconds(fact.seconds)} of communication is exposed, {show_percent(fact.share)}"
    return f"{amount}, most over {'*'.join(fact.axes)}: {fact.placement}"


@say.register
def _(fact: PipelineBubble) -> str:
    virtual = f" / {fact.virtual_stages}" if fact.virtual_stages > 1 else ""
    parts = f"{fact.num_microbatches} microbatch{'es' if fact.num_microbatches > 1 else ''}"
    amount = f"{show_seconds(fact.seconds)}, {show_percent(fact.share)}"
    return f"the pipeline's bubble is {amount}: {fact.stages} - 1 stages{virtual} for {parts}"


@say.register
def _(fact: MemoryUse) -> str:
    kept = f" ({show_percent(fact.headroom)} headroom for the error of the prediction)" if fact.headroom else ""
    most = f"most of it is {fact.largest}, {show_bytes(fact.largest_bytes)}"
    return f"memory is {show_percent(fact.share)} full{kept}; {most}"


@say.register
def _(fact: CausalFlops) -> str:
    return (
        f"MFU {show_percent(fact.mfu)} counts all scores of attention; of those that the causal mask keeps, which are"
        f" computed, it is {show_percent(fact.causal_mfu)}"
    )


@say.register
def _(fact: TrainingRun) -> str:
    cost = "" if fact.cost is None else f", which cost {fact.cost:,.0f}"
    days = f"{fact.seconds / 86400:,.3g} days"
    return f"{show_rate(fact.tokens, ' tokens')} take {days}, {fact.chip_hours:,.0f} chip hours{cost}"


@say.register
def _(fact: Gap) -> str:
    match fact.kind:
        case GapKind.BEST:
            return "-"
        case GapKind.MEMORY:
            return f"wants {show_bytes(fact.peak_bytes)}"
        case GapKind.TIED:
            more = f", {show_count(fact.parts, 'more setting')}" if fact.parts > 0 else ""
            return f"a tie: {show_seconds(fact.seconds)} faster{more}"
        case GapKind.FASTER:
            return f"faster by {show_seconds(fact.seconds)}"
        case GapKind.RECOMPUTE:
            return f"needs remat {fact.remat}: +{show_seconds(fact.seconds)}"
        case GapKind.COMMUNICATION:
            return f"{'*'.join(fact.axes)} communication: +{show_seconds(fact.seconds)}"
        case GapKind.TERM:
            return f"{fact.term} +{show_seconds(fact.seconds)}"
        case GapKind.EQUAL:
            return str(fact.kind)


@say.register
def _(fact: Exposure) -> str:
    over, exposed = "*".join(fact.axes), f"{show_percent(fact.share)} of the step exposed"
    if fact.wanted:
        return f"on {over}: {fact.tokens:,} tokens a device < {fact.wanted:,}, {exposed}"
    return f"on {over}: {exposed}"


@say.register
def _(fact: MoreChips) -> str:
    match fact.turn:
        case Turn.ALREADY:
            by_rule = "by the rule of thumb " if fact.by_rule else ""
            return f"{by_rule}communication bound already {_exposure(fact)}"
        case Turn.TURNS:
            return f"at {fact.factor}x the chips ({fact.chips:,}) this becomes communication bound {_exposure(fact)}"
        case Turn.ENDS:
            return f"up to {fact.chips:,} chips it stays {fact.bound} bound; beyond: {fact.reason}"
        case Turn.STAYS:
            return f"at {fact.factor}x the chips ({fact.chips:,}) it is {fact.bound} bound still"


@say.register
def _(fact: OtherBatch) -> str:
    if fact.turn is Turn.TURNS:
        becomes = f"{fact.bound} bound by that too, with {fact.tokens:,} tokens a device"
        if fact.exposure:
            becomes = f"communication bound {_exposure(fact)}"
        return f"at a batch of {fact.batch:,} this becomes {becomes}"
    if fact.turn is Turn.ENDS:
        return f"no smaller batch than {fact.batch:,} can be shared out on this mesh"
    return f"{'up' if fact.is_larger else 'down'} to a batch of {fact.batch:,} it stays {fact.bound} bound on this mesh"


@say.register
def _(fact: LongerSequences) -> str:
    match fact.limit:
        case SequenceLimit.ALREADY:
            return "it does not fit as it is"
        case SequenceLimit.POSITIONS:
            return f"sequences of {fact.seq_len:,} tokens fit; {fact.model} has {fact.positions:,} positions"
        case SequenceLimit.MESH:
            return f"sequences up to {fact.seq_len:,} tokens fit; beyond: {fact.reason}"
        case SequenceLimit.MEMORY:
            amount = f"{show_bytes(fact.peak_bytes)} of {show_bytes(fact.usable_bytes)}"
            return f"at {fact.seq_len:,} tokens a sequence it no longer fits: {amount}"
        case SequenceLimit.NONE:
            return f"sequences of {fact.seq_len:,} tokens fit still"


@say.register
def _(fact: StateSize) -> str:
    has = f"this plan has {', '.join(fact.axes)}" if fact.axes else "this plan has none"
    sizes = f"states of {show_bytes(fact.state_bytes)} are {fact.ratio:.3g}x the {show_bytes(fact.usable_bytes)}"
    return f"{sizes} of a device; {ADVICE[fact.wanted_axes]}; {has}"


@say.register
def _(fact: FsdpFirst) -> str:
    beside = f"; {str(fact.others).replace(',', ', ')} beside it" if fact.others.num_devices > 1 else ""
    return f"largest fsdp first: here {fact.fsdp:,} of {show_count(fact.num_devices, 'device')}{beside}"


@say.register
def _(fact: SequencesPerDevice) -> str:
    return (
        f"batch >= {'*'.join(fact.axes)}: {show_count(fact.batch, 'sequence')} on {fact.shards:,}, {fact.each:,} each"
    )


@say.register
def _(fact: Change) -> str:
    match fact.option, fact.value:
        case "remat", "offload":
            return "keep the inputs of layers in the host's memory"
        case "num_microbatches", count:
            return f"{count} microbatches"
        case "zero_stage", stage:
            return f"ZeRO stage {stage}"
        case "optimizer", _:
            return "moments in 8 bits"
        case "param_dtype", _:
            return "parameters and moments in bf16"
        case "attention", _:
            return "a fused attention kernel"
        case _:
            return f"{fact.option} {fact.value}"


@say.register
def _(fact: ImageStates) -> str:
    verdict = "only the batch has to be split: data parallel" if fact.fits else "it is the images that do not fit"
    size = f"{show_bytes(fact.state_bytes)}, {show_percent(fact.share)} of a device's memory"
    return f"{fact.parameters / 1e6:,.1f} M parameters with gradients and momentum are {size}: {verdict}"


@say.register
def _(fact: ImageActivations) -> str:
    return f"{show_bytes(fact.bytes)} are for {_images(fact.images)} a device, kept for backward"


@say.register
def _(fact: ReplicaInstead) -> str:
    return f"a copy on every device ({fact.mesh}) would do, but each would update all of it: {say(fact.gap)}"


@say.register
def _(fact: ImageCommunication) -> str:
    exposed = f"{show_seconds(fact.exposed_seconds)} is exposed, {show_percent(fact.share)} of the step"
    taken = f"{fact.equal_images:.2g} of its {_images(fact.images)}"
    return f"collectives take {show_seconds(fact.seconds)}, as long as the backward pass of {taken}; {exposed}"


@say.register
def _(fact: DataParallelLimit) -> str:
    if fact.devices is None:
        most = f"on up to {fact.tried:,} devices at least"
        return f"on dp alone this batch keeps that under {fact.share:.0%} of the step {most}"
    over = f"over {fact.share:.0%} of the step exposed from {fact.devices:,} devices on"
    return f"on dp alone this batch has {over}, {_images(fact.images)} each"


def _exposure(fact: MoreChips | OtherBatch) -> str:
    """The words for where communication is exposed."""
    assert fact.exposure is not None
    return say(fact.exposure)


def _images(count: int) -> str:
    """A number of images."""
    return f"{count:,} image{'s' if count != 1 else ''}"
