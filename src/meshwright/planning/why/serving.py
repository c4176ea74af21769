"""What limits the best serving layout and its batch, and why other layouts are worse."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Literal

from meshwright.description.hardware.fabric import lay_mesh
from meshwright.description.hardware.system import System
from meshwright.description.step.serve import kept_tokens, paged_tokens
from meshwright.planning.cost.kv_cache import sequence_cache_bytes, wasted_share
from meshwright.planning.cost.serving_bytes import most_sequences, serving_memory
from meshwright.planning.cost.serving_seconds import batch_of_equal_reads, compute_bound_batch, prefill_servers
from meshwright.planning.serving.plan import ServingPlan, make_serving_plan
from meshwright.planning.serving.search import MOST_SEQUENCES, best_prefill
from meshwright.planning.why.fact import Fact
from meshwright.planning.why.gap import largest_excess
from meshwright.units import show_bytes, show_percent, show_seconds

TERMS = {
    "weights": "HBM weights",
    "cache": "HBM cache",
    "elementwise": "HBM stream",
    "products": "compute",
    "attention": "attention",
    "small ops": "latency",
    "communication": "link",
}
"""The resource that limits each term of a serving step."""


@dataclass(frozen=True)
class Shortage(Fact):
    """No layout fits in memory: weights and cache on a device at a batch, and the bytes that are missing."""

    weights_bytes: int
    cache_bytes: int
    batch: int
    missing_bytes: float

    def __str__(self) -> str:
        parts = f"{show_bytes(self.weights_bytes)} of weights and {show_bytes(self.cache_bytes)} of cache"
        missing = show_bytes(self.missing_bytes)
        return f"nothing fits: {parts} a device at batch {self.batch:,} need {missing} more than there is"


@dataclass(frozen=True)
class Late(Fact):
    """No layout meets the latency: how much the shortest step exceeds it."""

    late_seconds: float
    latency_seconds: float

    def __str__(self) -> str:
        late, asked = show_seconds(self.late_seconds), show_seconds(self.latency_seconds)
        return f"nothing is in time: the shortest step is {late} over the {asked} asked for"


@dataclass(frozen=True)
class LongestTerm(Fact):
    """The term of a step that takes longest; share: its fraction of the step."""

    term: str
    seconds: float
    share: float

    def __str__(self) -> str:
        amount = f"{show_seconds(self.seconds)}, {show_percent(self.share)} of the step"
        return f"{TERMS[self.term]} bound: {self.term} is {amount}"


@dataclass(frozen=True)
class GatheredWeights(Fact):
    """Prefill that gathers weights over fsdp. tokens: those of a device in a step."""

    tokens: int

    def __str__(self) -> str:
        return f"weights are gathered over fsdp layer by layer, for {self.tokens:,} tokens on each device"


@dataclass(frozen=True)
class ServingThresholds(Fact):
    """Batches, over all devices, at which the bound of a decode step changes.

    compute_bound: the batch from which matmuls with weights are compute bound. equal_reads: the batch from which a
    device reads more cache than weights.
    """

    compute_bound: float
    equal_reads: float

    def __str__(self) -> str:
        return (
            f"matmuls are compute bound from batch {math.ceil(self.compute_bound):,},"
            f" more cache than weights is read from batch {math.ceil(self.equal_reads):,}"
        )


@dataclass(frozen=True)
class BatchLimit(Fact):
    """What prevents a larger batch: memory, the requested latency, or neither.

    batch: the plan's batch, plus one sequence per group of devices. peak_bytes, seconds and tokens_per_second are those
    of this batch. most: the largest batch that fits in memory; 0 if memory is the limit.
    """

    limit: Literal["memory", "latency", "none"]
    batch: int
    peak_bytes: int
    usable_bytes: float
    seconds: float = 0.0
    tokens_per_second: float = 0.0
    most: int = 0

    def __str__(self) -> str:
        named = f"batch {self.batch:,}"
        if self.limit == "memory":
            wanted = f"{show_bytes(self.peak_bytes)} of {show_bytes(self.usable_bytes)} a device"
            return f"memory limits the batch: {named} needs {wanted}"
        if self.limit == "latency":
            return f"latency limits the batch: {named} takes {show_seconds(self.seconds)}; {self.most:,} fit in memory"
        rate = f"{self.tokens_per_second:,.0f} tok/s"
        return f"{named} would take {show_seconds(self.seconds)} at {rate}; {self.most:,} fit in memory"


@dataclass(frozen=True)
class SequenceCache(Fact):
    """KV cache of a sequence when it ends.

    tokens: the tokens in the cache. context: the tokens of the sequence, more than `tokens` if there is a sliding
    window. pages: the number of pages, of `page_size` tokens each. empty_share: unused fraction of the pages. bytes:
    the sum over all devices.
    """

    tokens: int
    context: int
    pages: int
    page_size: int
    empty_share: float
    bytes: float

    def __str__(self) -> str:
        window = f", the last of {self.context:,}," if self.tokens < self.context else ""
        pages = f"{self.pages:,} pages of {self.page_size}, {show_percent(self.empty_share)} of them empty"
        return f"a sequence ends with {self.tokens:,} tokens{window} in {pages}: {show_bytes(self.bytes)}"


@dataclass(frozen=True)
class PrefillSystems(Fact):
    """Number of prefill systems that keep one decoding system of the same size busy.

    system, layout: those of each prefill system. prompt_seconds: the seconds of a step with one prompt per group of
    devices.
    """

    systems: float
    system: str
    prompt_seconds: float
    layout: str

    def __str__(self) -> str:
        count = f"{self.systems:.2f}" if self.systems < 10 else f"{self.systems:,.0f}"
        prompt = f"{show_seconds(self.prompt_seconds)} a prompt on {self.layout}"
        return f"prefill on {count} of {self.system} keeps this one busy: {prompt}"


ServingFact = (
    Shortage | Late | LongestTerm | GatheredWeights | ServingThresholds | BatchLimit | SequenceCache | PrefillSystems
)


class ServingGapKind(StrEnum):
    """Why a layout is not the best."""

    BEST = "best"
    MEMORY = "does not fit"
    LATE = "late"
    EQUAL = "as fast, with less memory left"
    TERM = "term"


@dataclass(frozen=True)
class ServingGap(Fact):
    """The largest difference between a layout and the best layout.

    term, seconds: the term of the step that exceeds the best layout's most, and by how much; for LATE, seconds beyond
    the latency, at batch `batch`. per_token: whether `seconds` is divided by the batch. missing_bytes: for MEMORY, the
    bytes per device that are missing.
    """

    kind: ServingGapKind
    term: str = ""
    seconds: float = 0.0
    per_token: bool = False
    batch: int = 0
    missing_bytes: float = 0.0

    def __str__(self) -> str:
        match self.kind:
            case ServingGapKind.BEST:
                return "-"
            case ServingGapKind.MEMORY:
                return f"{show_bytes(self.missing_bytes)} too much"
            case ServingGapKind.LATE:
                return f"{show_seconds(self.seconds)} late at batch {self.batch:,}"
            case ServingGapKind.TERM:
                return f"{TERMS[self.term]} +{show_seconds(self.seconds)}" + ("/token" if self.per_token else "")
            case ServingGapKind.EQUAL:
                return str(self.kind)


@dataclass(frozen=True)
class PrefillShare:
    """Number of prefill systems that keep one decoding system busy, and the plan of each."""

    systems: float
    plan: ServingPlan


def thresholds(plan: ServingPlan, system: System) -> ServingThresholds:
    """Return the batches at which the bound of a decode step changes."""
    return ServingThresholds(
        compute_bound_batch(plan.serving, plan.layout, system), batch_of_equal_reads(plan.serving, plan.layout)
    )


def prefill_share(plan: ServingPlan, system: System) -> PrefillShare | None:
    """Return the number of prefill systems for each system that decodes as planned; None if no prompt fits.

    A prefill system processes one prompt per group of devices at a time. In steady state, sequences are prefilled at
    the rate at which they end (`cost.serving_seconds.prefill_servers`).
    """
    prefill = best_prefill(plan.serving, system)
    if prefill is None:
        return None
    share = prefill_servers(
        prefill_seconds=prefill.seconds / prefill.batch,
        step_seconds=plan.seconds,
        batch=plan.batch,
        decode_tokens=plan.serving.output_len,
    )
    return PrefillShare(share, prefill)


def longest_term(plan: ServingPlan) -> LongestTerm:
    """Return the term of a step that takes longest."""
    terms = plan.predicted.breakdown_seconds
    longest = max(terms, key=terms.__getitem__)
    return LongestTerm(longest, terms[longest], terms[longest] / plan.seconds)


def why_serving(plan: ServingPlan, system: System) -> tuple[ServingFact, ...]:
    """Return the facts on a serving plan: unmet requirements, the longest term, thresholds, and limits of its batch."""
    is_decode, fits = plan.serving.phase == "decode", plan.predicted.fits
    found: list[ServingFact | None] = [_missed(plan, system), longest_term(plan)]
    if plan.layout.gathers_weights(plan.serving):
        groups = plan.layout.num_groups * plan.mesh.fsdp
        found.append(GatheredWeights(math.ceil(plan.batch / groups) * plan.serving.prompt_len))
    found.append(thresholds(plan, system) if is_decode else None)
    found.append(_limit(plan, system) if fits else None)
    if is_decode:
        found += [_cache(plan), _prefill(plan, system) if fits else None]
    return tuple(fact for fact in found if fact is not None)


def _missed(plan: ServingPlan, system: System) -> Shortage | Late | None:
    """Return by how much a plan exceeds the memory or else the latency; None if it exceeds neither."""
    memory, asked = plan.predicted.memory_bytes, plan.serving.latency_seconds
    if not plan.predicted.fits:
        return Shortage(memory["weights"], memory["cache"], plan.batch, memory["peak"] - system.plannable_bytes)
    if asked is not None and not plan.is_in_time:
        return Late(plan.seconds - asked, asked)
    return None


def _limit(plan: ServingPlan, system: System) -> BatchLimit:
    groups = plan.layout.num_groups
    batch, usable = plan.batch + groups, system.plannable_bytes
    larger, laid = replace(plan.serving, batch=batch), lay_mesh(system, plan.mesh.layout)
    peak = serving_memory(larger, plan.layout, batch, laid)["peak"]
    if peak > usable:
        return BatchLimit("memory", batch, peak, usable)
    step = make_serving_plan(larger, plan.layout, system)
    asked = plan.serving.latency_seconds
    most = groups * most_sequences(plan.serving, plan.layout, usable, MOST_SEQUENCES, laid)
    limit = "latency" if asked is not None and step.seconds > asked else "none"
    return BatchLimit(limit, batch, peak, usable, step.seconds, step.tokens_per_second, most)


def _cache(plan: ServingPlan) -> SequenceCache:
    """Return the size of a finished sequence's KV cache, as a fact."""
    serving = plan.serving
    return SequenceCache(
        tokens=kept_tokens(serving),
        context=serving.context,
        pages=math.ceil(paged_tokens(serving) / serving.page_size),
        page_size=serving.page_size,
        empty_share=wasted_share(serving),
        bytes=sequence_cache_bytes(serving),
    )


def _prefill(plan: ServingPlan, system: System) -> PrefillSystems | None:
    share = prefill_share(plan, system)
    if share is None:
        return None
    return PrefillSystems(share.systems, str(system), share.plan.seconds, str(share.plan.layout))


def serving_gap(plan: ServingPlan, best: ServingPlan, system: System) -> ServingGap:
    """Return the largest difference between a plan and the best plan: missing memory, late steps, or a longer term.

    If a latency is requested, throughput decides: then terms are divided by the batch.
    """
    if plan is best:
        return ServingGap(ServingGapKind.BEST)
    if not plan.predicted.fits:
        missing = plan.predicted.memory_bytes["peak"] - system.plannable_bytes
        return ServingGap(ServingGapKind.MEMORY, missing_bytes=missing)
    asked = plan.serving.latency_seconds
    if asked is not None and not plan.is_in_time:
        return ServingGap(ServingGapKind.LATE, seconds=plan.seconds - asked, batch=plan.batch)
    longest, seconds = largest_excess(_terms(plan), _terms(best))
    if seconds <= 0:
        return ServingGap(ServingGapKind.EQUAL)
    return ServingGap(ServingGapKind.TERM, longest, seconds, per_token=asked is not None)


def _terms(plan: ServingPlan) -> dict[str, float]:
    """Return the seconds of a step by term; if a latency is requested, they are divided by the batch."""
    share = plan.batch if plan.serving.latency_seconds else 1
    return {name: time / share for name, time in plan.predicted.breakdown_seconds.items()}
