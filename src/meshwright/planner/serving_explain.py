"""Why: what binds the best layout, what keeps its batch from growing, and why each of the others loses."""

from __future__ import annotations

import math
from collections.abc import Iterator
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
from meshwright.planner.serving import MOST_SEQUENCES, best_prefill
from meshwright.planner.serving_plan import ServingPlan, make_serving_plan
from meshwright.record import Record
from meshwright.step.serve import kept_tokens, paged_tokens
from meshwright.units import show_bytes, show_percent, show_seconds

WAITS = {
    "weights": "HBM weights",
    "cache": "HBM cache",
    "elementwise": "HBM stream",
    "products": "compute",
    "attention": "attention",
    "communication": "link",
}
"""What each term of a step waits for, in words."""


@dataclass(frozen=True)
class ServingThresholds:
    """The batches, over all devices, at which a decode step changes its kind.

    compute_bound: from here products with weights are bound by arithmetic. equal_reads: from here a device reads more
    cache than weights.
    """

    compute_bound: float
    equal_reads: float


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


def bound_in_words(record: Record) -> str:
    """What the longest term of a step waits for."""
    return WAITS[max(record.breakdown_seconds, key=record.breakdown_seconds.__getitem__)]


def why_serving(plan: ServingPlan, system: System) -> list[str]:
    """What decides a step, when that changes, and what keeps the batch from growing, a line each."""
    lines = [line for line in (_missed(plan, system), _bound(plan), _changes(plan, system)) if line]
    if plan.predicted.fits:
        lines.append(_limit(plan, system))
    if plan.serving.phase == "decode":
        lines.append(_pages(plan))
        lines += _prefill(plan, system)
    return [f"why: {lines[0]}", *(f"     {line}" for line in lines[1:]), *_notes(plan)]


def _notes(plan: ServingPlan) -> Iterator[str]:
    """The notes of a plan's record."""
    return (f"note: {note}" for note in plan.predicted.notes)


def _missed(plan: ServingPlan, system: System) -> str:
    """What was asked for and no layout does, and by how much."""
    memory, asked = plan.predicted.memory_bytes, plan.serving.latency_seconds
    if not plan.predicted.fits:
        short = memory["peak"] - system.usable_bytes
        parts = " and ".join(f"{show_bytes(memory[name])} of {name}" for name in ("weights", "cache"))
        return f"nothing fits: {parts} a device at batch {plan.batch:,} want {show_bytes(short)} more than there is"
    if asked is not None and not plan.is_in_time:
        late = plan.seconds - asked
        return f"nothing is in time: the shortest step is {show_seconds(late)} over the {show_seconds(asked)} asked for"
    return ""


def _bound(plan: ServingPlan) -> str:
    """The term that takes longest."""
    terms = plan.predicted.breakdown_seconds
    longest = max(terms, key=terms.__getitem__)
    share = show_percent(terms[longest] / plan.seconds)
    return f"{WAITS[longest]} bound: {longest} is {show_seconds(terms[longest])}, {share} of the step"


def _changes(plan: ServingPlan, system: System) -> str:
    """The thresholds of a decode step."""
    if plan.serving.phase == "prefill":
        return ""
    found = thresholds(plan, system)
    return (
        f"products are compute bound from batch {math.ceil(found.compute_bound):,},"
        f" more cache than weights is read from batch {math.ceil(found.equal_reads):,}"
    )


def _limit(plan: ServingPlan, system: System) -> str:
    """What one more sequence in each group would do."""
    groups = plan.layout.num_groups
    larger = replace(plan.serving, batch=plan.batch + groups)
    wanted = serving_memory(larger, plan.layout, plan.batch + groups)["peak"]
    named = f"batch {plan.batch + groups:,}"
    if wanted > system.usable_bytes:
        return (
            f"memory keeps the batch: {named} wants {show_bytes(wanted)} of {show_bytes(system.usable_bytes)} a device"
        )
    step = make_serving_plan(larger, plan.layout, system)
    asked = plan.serving.latency_seconds
    most = groups * most_sequences(plan.serving, plan.layout, system.usable_bytes, MOST_SEQUENCES)
    if asked is not None and step.seconds > asked:
        return f"latency keeps the batch: {named} takes {show_seconds(step.seconds)}; {most:,} fit in memory"
    rate = f"{step.tokens_per_second:,.0f} tok/s"
    return f"{named} would take {show_seconds(step.seconds)} at {rate}; {most:,} fit in memory"


def _pages(plan: ServingPlan) -> str:
    """What a sequence holds at its end."""
    serving = plan.serving
    pages = paged_tokens(serving) // serving.page_size
    window = f", the last of {serving.context:,}," if kept_tokens(serving) < serving.context else ""
    return (
        f"a sequence ends with {kept_tokens(serving):,} tokens{window} in {pages:,} pages of {serving.page_size},"
        f" {show_percent(wasted_share(serving))} of them empty: {show_bytes(sequence_cache_bytes(serving))}"
    )


def _prefill(plan: ServingPlan, system: System) -> Iterator[str]:
    """The systems that prefill."""
    share = prefill_share(plan, system) if plan.predicted.fits else None
    if share is None:
        return
    prompt = show_seconds(share.plan.seconds)
    systems = f"{share.systems:.2f} of {system}" if share.systems < 10 else f"{share.systems:,.0f} of {system}"
    yield f"prompts keep {systems} busy beside this one: {prompt} a prompt on {share.plan.layout}"


def serving_reason(plan: ServingPlan, best: ServingPlan, system: System) -> str:
    """The one reason for which a plan loses against the best: what does not fit, what is late, or its dearest term.

    Where throughput decides, terms are those of a token: of a step over its batch.
    """
    if plan is best:
        return "-"
    if not plan.predicted.fits:
        return f"{show_bytes(plan.predicted.memory_bytes['peak'] - system.usable_bytes)} too much"
    asked = plan.serving.latency_seconds
    if asked is not None and not plan.is_in_time:
        return f"{show_seconds(plan.seconds - asked)} late at batch {plan.batch:,}"
    ours, theirs = _compared(plan), _compared(best)
    gaps = {name: time - theirs[name] for name, time in ours.items()}
    longest = max(gaps, key=gaps.__getitem__)
    if gaps[longest] <= 0:
        return "as fast, with less memory left"
    return f"{WAITS[longest]} +{show_seconds(gaps[longest])}" + ("/token" if asked else "")


def _compared(plan: ServingPlan) -> dict[str, float]:
    """The terms of a step by which plans are compared."""
    share = plan.batch if plan.serving.latency_seconds else 1
    return {name: time / share for name, time in plan.predicted.breakdown_seconds.items()}
