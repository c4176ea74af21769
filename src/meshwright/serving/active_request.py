"""A request that the engine works on."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from meshwright.inference.stream import GrowingText
from meshwright.serving.constraints import Matcher
from meshwright.serving.request import Output, OutputCallback, Request, TokenLogprob
from meshwright.serving.sequence import TokenSequence


@dataclass(eq=False)
class ActiveRequest:
    """A request that has not ended: its sequences, their texts so far, and the scores of its prompt."""

    request: Request
    deliver: OutputCallback
    sequences: list[TokenSequence] = field(default_factory=list)
    growing: dict[int, GrowingText] = field(default_factory=dict)
    logprobs: dict[int, TokenLogprob] = field(default_factory=dict)
    """Of the prompt's tokens, by position."""
    hidden: dict[int, np.ndarray] = field(default_factory=dict)
    """The sums of hidden states of chunks, by the position of their first token."""
    matchers: list[Matcher] = field(default_factory=list)
    """One for each sequence, if the request has a constraint."""
    deadline: float | None = None

    def output(
        self,
        sequence: TokenSequence,
        tokens: tuple[int, ...],
        piece: str,
        logprobs: tuple[TokenLogprob, ...],
    ) -> Output:
        """The output of a step for a sequence; the first one has the prompt's scores too."""
        prompt, pooled = (), ()
        if sequence.number == 0 and self.logprobs:
            prompt = tuple(self.logprobs[position] for position in range(1, len(self.request.prompt)))
            self.logprobs = {}
        if sequence.number == 0 and self.hidden:
            sums = np.sum(np.stack(list(self.hidden.values())), axis=0, dtype=np.float64)
            pooled = tuple(np.asarray(sums / len(self.request.prompt)).tolist()) if self.request.pooled else ()
            self.hidden = {}
        cached, sequence.cached = sequence.cached or 0, 0
        return Output(
            completion=sequence.number,
            tokens=tokens,
            text=piece,
            logprobs=logprobs,
            done=sequence.done,
            stop=self.growing[sequence.number].stop if sequence.done == "text" else None,
            cached_tokens=cached,
            prompt_logprobs=prompt,
            pooled=pooled,
        )
