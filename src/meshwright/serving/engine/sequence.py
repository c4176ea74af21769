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
    """The sequence of one completion: the prompt and the tokens generated after it.

    Args:
        number: index of the completion in its request.
        request: the request, with the completion's own seed.
        tokens: the prompt, and the generated tokens that are on the host.
        order: order of arrival; older sequences (lower numbers) are scheduled first and preempted last.
        computed: number of tokens whose keys and values are in pages, counting dispatched steps.
        in_flight: number of dispatched steps whose chosen tokens for this sequence are not on the host yet.
        row: its row in the engine's batch; None while it waits.
        shard: the shard of its row.
        pages: for each attention window, the number of each page of `page_size` tokens; None once it was released.
        prefill_length: number of tokens at its last prefill, on which the rotary frequencies of some models depend.
        cached: number of prompt tokens found in the prefix cache, 0 once reported in an output; None before its first
            row.
        done: why it ended; None while it is generated.
        submitted: time at which the engine received it, on the clock `time.monotonic`.
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
    """For each attention window, the number of leading pages that were released."""
    is_scored: bool = False
    """Whether the prompt's log probabilities or hidden states must still be computed (without the prefix cache)."""
    inserted: int = 0
    """Number of leading tokens whose pages were inserted into the prefix cache."""
    prefill_length: int = 0
    cached: int | None = None
    done: Ending | None = None
    submitted: float = field(default_factory=monotonic)
    drafts: NgramDrafts | ModelDrafts | None = None
    """The source of draft tokens for speculative decoding; None for no drafts."""
    matcher: Matcher | None = None
    """The state of its constraint; None for no constraint."""
    mask: np.ndarray | None = None
    """The bit mask of next tokens that its constraint allows; None for no constraint."""
    not_ends: np.ndarray | None = None
    """The bit mask of all tokens except stop tokens, used up to min_tokens; None if there is no minimum."""

    @property
    def group(self) -> tuple[str, str]:
        """The owner (client), and the name of the owner's group of requests that share rows like a single request."""
        return self.request.owner, self.request.group or self.request_id

    @property
    def num_generated(self) -> int:
        """Number of generated tokens, including those in flight."""
        return len(self.tokens) + self.in_flight - len(self.request.prompt)

    @property
    def needs_sampling_program(self) -> bool:
        """Whether the next token needs the sampling program even if the row's sampling options are greedy."""
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
