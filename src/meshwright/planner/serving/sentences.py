"""Facts of serving plans as text; they join `planner.sentences.say`."""

from __future__ import annotations

import math

from meshwright.planner.sentences import say
from meshwright.planner.serving.facts import (
    BatchLimit,
    Late,
    LongestTerm,
    PrefillSystems,
    SequenceCache,
    ServingGap,
    ServingGapKind,
    ServingThresholds,
    Shortage,
)
from meshwright.units import show_bytes, show_percent, show_seconds

TERMS = {
    "weights": "HBM weights",
    "cache": "HBM cache",
    "elementwise": "HBM stream",
    "products": "compute",
    "attention": "attention",
    "communication": "link",
}
"""What each term of a serving step waits for."""


@say.register
def _(fact: Shortage) -> str:
    parts = f"{show_bytes(fact.weights_bytes)} of weights and {show_bytes(fact.cache_bytes)} of cache"
    missing = show_bytes(fact.missing_bytes)
    return f"nothing fits: {parts} a device at batch {fact.batch:,} want {missing} more than there is"


@say.register
def _(fact: Late) -> str:
    late, asked = show_seconds(fact.late_seconds), show_seconds(fact.latency_seconds)
    return f"nothing is in time: the shortest step is {late} over the {asked} asked for"


@say.register
def _(fact: LongestTerm) -> str:
    amount = f"{show_seconds(fact.seconds)}, {show_percent(fact.share)} of the step"
    return f"{TERMS[fact.term]} bound: {fact.term} is {amount}"


@say.register
def _(fact: ServingThresholds) -> str:
    return (
        f"products are compute bound from batch {math.ceil(fact.compute_bound):,},"
        f" more cache than weights is read from batch {math.ceil(fact.equal_reads):,}"
    )


@say.register
def _(fact: BatchLimit) -> str:
    named = f"batch {fact.batch:,}"
    if fact.limit == "memory":
        wanted = f"{show_bytes(fact.peak_bytes)} of {show_bytes(fact.usable_bytes)} a device"
        return f"memory keeps the batch: {named} wants {wanted}"
    if fact.limit == "latency":
        return f"latency keeps the batch: {named} takes {show_seconds(fact.seconds)}; {fact.most:,} fit in memory"
    rate = f"{fact.tokens_per_second:,.0f} tok/s"
    return f"{named} would take {show_seconds(fact.seconds)} at {rate}; {fact.most:,} fit in memory"


@say.register
def _(fact: SequenceCache) -> str:
    window = f", the last of {fact.context:,}," if fact.tokens < fact.context else ""
    pages = f"{fact.pages:,} pages of {fact.page_size}, {show_percent(fact.empty_share)} of them empty"
    return f"a sequence ends with {fact.tokens:,} tokens{window} in {pages}: {show_bytes(fact.bytes)}"


@say.register
def _(fact: PrefillSystems) -> str:
    count = f"{fact.systems:.2f}" if fact.systems < 10 else f"{fact.systems:,.0f}"
    prompt = f"{show_seconds(fact.prompt_seconds)} a prompt on {fact.layout}"
    return f"prompts keep {count} of {fact.system} busy beside this one: {prompt}"


@say.register
def _(fact: ServingGap) -> str:
    match fact.kind:
        case ServingGapKind.BEST:
            return "-"
        case ServingGapKind.MEMORY:
            return f"{show_bytes(fact.missing_bytes)} too much"
        case ServingGapKind.LATE:
            return f"{show_seconds(fact.seconds)} late at batch {fact.batch:,}"
        case ServingGapKind.TERM:
            return f"{TERMS[fact.term]} +{show_seconds(fact.seconds)}" + ("/token" if fact.per_token else "")
        case ServingGapKind.EQUAL:
            return str(fact.kind)
