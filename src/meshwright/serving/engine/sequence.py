"""A sequence being generated: its tokens, its pages, and its row in the engine."""

from __future__ import annotations

from dataclasses import dataclass, field
from time import monotonic

import numpy as np

from meshwright.serving.engine.constraints import Matcher
from meshwright.serving.engine.drafts import ModelDrafts, NgramDrafts
from meshwright.serving.engine.request import Ending, Request


@dataclass(eq=False)
class TokenSequence:
    """One of the sequences of a request (`num_completions` of them).

    Args:
        tokens: the prompt, and the generated tokens that are on the host.
        order: arrival number; older sequences are scheduled first and preempted last.
        computed: number of tokens whose keys and values are in pages, counting dispatched steps.
        in_flight: number of generated tokens of dispatched steps that are not on the host yet.
        row: its row in the engine's batch; None while it waits.
        pages: for each window, a page for each `page_size` tokens; None for a page that was released.
        prefill_length: number of tokens at its last prefill, on which the rotary frequencies of some models depend.
        cached: number of prompt tokens found in the prefix cache; None before its first row.
    """

    request_id: str
    number: int
    request: Request
    tokens: list[int]
    order: int
    first: TokenSequence | None = None
    """The sequence of the same request that computes the prompt; None for that sequence itself."""
    computed: int = 0
    in_flight: int = 0
    row: int | None = None
    shard: int = 0
    pages: list[list[int | None]] = field(default_factory=list)
    freed: list[int] = field(default_factory=list)
    """For each window, the number of leading pages that were released."""
    is_scored: bool = False
    """Whether the prompt's log probabilities or hidden states are still to be computed, without the prefix cache."""
    inserted: int = 0
    """Number of tokens whose pages were inserted into the prefix cache."""
    prefill_length: int = 0
    cached: int | None = None
    done: Ending | None = None
    submitted: float = field(default_factory=monotonic)
    drafts: NgramDrafts | ModelDrafts | None = None
    """The source of draft tokens for speculative decoding; None for no drafts."""
    matcher: Matcher | None = None
    """The state of its constraint; None for no constraint."""
    mask: np.ndarray | None = None
    """The bit mask of next tokens that its constraint allows."""
    not_ends: np.ndarray | None = None
    """The bit mask of all tokens except stop tokens, used up to min_tokens; None if there is no minimum."""

    @property
    def group(self) -> tuple[str, str]:
        """The owner, and the group of requests with which the sequence shares rows."""
        return self.request.owner, self.request.group or self.request_id

    @property
    def num_generated(self) -> int:
        """Number of generated tokens, including those in flight."""
        return len(self.tokens) + self.in_flight - len(self.request.prompt)

    @property
    def needs_sampling_program(self) -> bool:
        """Whether the next token needs more than the greedy program, whatever the row's sampling options are."""
        request = self.request
        return request.logprobs is not None or self.mask is not None or self.num_generated - 1 < request.min_tokens

    @property
    def needs_last_tokens(self) -> bool:
        """Whether the host must read the last step's tokens before it can build the next step."""
        return self.matcher is not None or self.drafts is not None

    @property
    def is_prefilled(self) -> bool:
        """Whether all tokens except the newest are computed, so that the next step decodes."""
        return self.computed == len(self.tokens) + self.in_flight - 1
