"""One text while it is made: its tokens, its pages, and where it is in the engine."""

from __future__ import annotations

from dataclasses import dataclass, field
from time import monotonic

import numpy as np

from meshwright.serving.constraints import Matcher
from meshwright.serving.drafts import ModelDrafts, NgramDrafts
from meshwright.serving.request import Ending, Request


@dataclass(eq=False)
class Text:
    """One of the texts of a request.

    Args:
        tokens: of the prompt, and those made that are known.
        order: when it came, by which texts are served and kept.
        computed: how many tokens have keys in pages, or will by the steps that are on their way.
        unread: how many tokens were chosen in steps that are on their way.
        row: in the engine, None while it waits.
        pages: of each window a page, or None where it is not needed any more, for each `page_size` tokens.
        read_length: its tokens when it was read last, on which the frequencies of some models depend.
        cached: tokens of the prompt whose keys were found in pages.
    """

    request_id: str
    number: int
    request: Request
    tokens: list[int]
    order: int
    first: Text | None = None
    """The text of the same prompt that reads it first."""
    computed: int = 0
    unread: int = 0
    row: int | None = None
    shard: int = 0
    pages: list[list[int | None]] = field(default_factory=list)
    freed: list[int] = field(default_factory=list)
    """Of each window, pages at the beginning that were freed."""
    is_scored: bool = False
    """Whether its prompt is still to be read for log probabilities or hidden states, so that all of it is computed."""
    inserted: int = 0
    """Tokens whose pages the prefix cache was offered."""
    read_length: int = 0
    cached: int | None = None
    done: Ending | None = None
    submitted: float = field(default_factory=monotonic)
    drafts: NgramDrafts | ModelDrafts | None = None
    """Guesses of the next tokens; None where none are made."""
    matcher: Matcher | None = None
    """The state of its constraint; None where it has none."""
    mask: np.ndarray | None = None
    """Bits of the tokens that may come next, where a constraint says so."""

    @property
    def num_made(self) -> int:
        """The tokens chosen so far, also those that are not read."""
        return len(self.tokens) + self.unread - len(self.request.prompt)

    @property
    def needs_its_tokens(self) -> bool:
        """Whether the next step depends on tokens that the last one chose."""
        return self.matcher is not None or self.drafts is not None

    @property
    def is_read(self) -> bool:
        """Whether all its tokens but the newest have keys: the next step chooses the one after it."""
        return self.computed == len(self.tokens) + self.unread - 1
