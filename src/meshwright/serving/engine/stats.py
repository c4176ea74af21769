"""The numbers of an engine that its server shows."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Stats:
    """An engine at one moment, and what it has done since it began.

    Args:
        queued: requests that wait. running: those in the batch.
        num_pages: of the KV cache. used_pages: those that a request or the prefix cache needs.
        computed_tokens: of prompts, that were computed. prefix_hit_tokens: that were in the prefix cache instead.
        generated_tokens: tokens made, of requests that were aborted too.
        preemptions: how often a request lost its pages to others, and was computed again or swapped in.
        num_steps: device steps.
        uncompiled_programs: those that are still compiled while requests are answered.
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
