"""Statistics of an engine, as its server reports them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Stats:
    """The state of an engine, and its totals since the start.

    Args:
        queued: sequences that wait for a row, and requests that the engine's thread has not received yet.
        running: sequences that have a row.
        num_pages: pages of the KV cache, for the attention window with most pages.
        used_pages: pages that a request or the prefix cache holds.
        computed_tokens: prompt tokens that were computed.
        prefix_hit_tokens: prompt tokens found in the prefix cache, which were not computed.
        generated_tokens: generated tokens, including those of aborted requests.
        preemptions: how often a sequence lost its pages to others and was computed again.
        num_steps: device steps.
        uncompiled_programs: programs still being compiled while requests are answered.
    """

    queued: int = 0
    running: int = 0
    num_pages: int = 0
    used_pages: int = 0
    computed_tokens: int = 0
    prefix_hit_tokens: int = 0
    generated_tokens: int = 0
    preemptions: int = 0
    num_steps: int = 0
    uncompiled_programs: int = 0
