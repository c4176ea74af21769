"""Why: what binds the best layout, what keeps its batch from growing, why each of the others loses; as facts."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from meshwright.cost import (
    batch_of_equal_reads,
    compute_bound_batch,
    most_sequences,
    prefill_servers,
    sequence_cache_bytes,
    serving_memory,
    wasted_share,
)
from meshwright.hardware import System
from meshwright.planner.serving.facts import (
    BatchLimit,
    Late,
    LongestTerm,
    PrefillSystems,
    SequenceCache,
    ServingFact,
    ServingGap,
    ServingGapKind,
    ServingThresholds,
    Shortage,
)
from meshwright.planner.serving.plan import ServingPlan, make_serving_plan
from meshwright.planner.serving.search import MOST_SEQUENCES, best_prefill
from meshwright.step.serve import kept_tokens, paged_tokens


@dataclass(frozen=True)
class PrefillShare:
    """The systems that prefill for each one that decodes, and the plan of those that do."""

    systems: float
    plan: ServingPlan


def thresholds(plan: ServingPlan, system: System) -> ServingThresholds:
    """The batches at which a step of a layout changes its kind."""
    return ServingThresholds(
        compute_bound_batch(plan.serving, plan.layout, system), batch_of_equal_reads(plan.serving, plan.layout)
    )


def prefill_share(plan: ServingPlan, system: System) -> PrefillShare | None:
    """The systems of the same size that prefill, one prompt alone in each group, for each that decodes as planned.

    None where no prompt fits. In the steady state as many sequences are prefilled as end (`cost.prefill_servers`).
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
    """The term of a step that takes longest."""
    terms = plan.predicted.breakdown_seconds
    longest = max(terms, key=terms.__getitem__)
    return LongestTerm(longest, terms[longest], terms[longest] / plan.seconds)


def why_serving(plan: ServingPlan, system: System) -> tuple[ServingFact, ...]:
    """What decides a step, when that changes, and what keeps the batch from growing."""
    is_decode, fits = plan.serving.phase == "decode", plan.predicted.fits
    found: list[ServingFact | None] = [_missed(plan, system), longest_term(plan)]
    found.append(thresholds(plan, system) if is_decode else None)
    found.append(_limit(plan, system) if fits else None)
    if is_decode:
        found += [_cache(plan), _prefill(plan, system) if fits else None]
    return tuple(fact for fact in found if fact is not None)


def _missed(plan: ServingPlan, system: System) -> Shortage | Late | None:
    """What was asked for and no layout does, and by how much."""
    memory, asked = plan.predicted.memory_bytes, plan.serving.latency_seconds
    if not plan.predicted.fits:
        return Shortage(memory["weights"], memory["cache"], plan.batch, memory["peak"] - system.plannable_bytes)
    if asked is not None and not plan.is_in_time:
        return Late(plan.seconds - asked, asked)
    return None


def _limit(plan: ServingPlan, system: System) -> BatchLimit:
    """What one more sequence in each group would do."""
    groups = plan.layout.num_groups
    batch, usable = plan.batch + groups, system.plannable_bytes
    larger = replace(plan.serving, batch=batch)
    peak = serving_memory(larger, plan.layout, batch)["peak"]
    if peak > usable:
        return BatchLimit("memory", batch, peak, usable)
    step = make_serving_plan(larger, plan.layout, system)
    asked = plan.serving.latency_seconds
    most = groups * most_sequences(plan.serving, plan.layout, usable, MOST_SEQUENCES)
    limit = "latency" if asked is not None and step.seconds > asked else "none"
    return BatchLimit(limit, batch, peak, usable, step.seconds, step.tokens_per_second, most)


def _cache(plan: ServingPlan) -> SequenceCache:
    """What a sequence holds at its end."""
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
    """The systems that prefill."""
    share = prefill_share(plan, system)
    if share is None:
        return None
    return PrefillSystems(share.systems, str(system), share.plan.seconds, str(share.plan.layout))


def serving_gap(plan: ServingPlan, best: ServingPlan, system: System) -> ServingGap:
    """The largest difference of a plan from the best: what does not fit, what is late, or its dearest term.

    Where throughput decides, terms are those of a token: of a step over its batch.
    """
    if plan is best:
        return ServingGap(ServingGapKind.BEST)
    if not plan.predicted.fits:
        missing = plan.predicted.memory_bytes["peak"] - system.plannable_bytes
        return ServingGap(ServingGapKind.MEMORY, missing_bytes=missing)
    asked = plan.serving.latency_seconds
    if asked is not None and not plan.is_in_time:
        return ServingGap(ServingGapKind.LATE, seconds=plan.seconds - asked, batch=plan.batch)
    ours, theirs = _compared(plan), _compared(best)
    gaps = {name: time - theirs[name] for name, time in ours.items()}
    longest = max(gaps, key=gaps.__getitem__)
    if gaps[longest] <= 0:
        return ServingGap(ServingGapKind.EQUAL)
    return ServingGap(ServingGapKind.TERM, longest, gaps[longest], per_token=asked is not None)


def _compared(plan: ServingPlan) -> dict[str, float]:
    """The terms of a step by which plans are compared."""
    share = plan.batch if plan.serving.latency_seconds else 1
    return {name: time / share for name, time in plan.predicted.breakdown_seconds.items()}
