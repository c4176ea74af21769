"""A request that the engine is working on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from meshwright.execution.models.inference.stream import GrowingText
from meshwright.execution.text.tokenizer import Tokenizer, TokenStream
from meshwright.serving.engine.constraints import Matcher, bits_of
from meshwright.serving.engine.request import Output, OutputCallback, Request, TokenLogprob
from meshwright.serving.engine.scheduler import SequenceRow
from meshwright.serving.engine.sequence import TokenSequence


@dataclass(eq=False)
class ActiveRequest:
    """A request that has not ended: its sequences, their text so far, and the log probabilities of its prompt."""

    request: Request
    deliver: OutputCallback
    sequences: list[TokenSequence] = field(default_factory=list)
    growing: dict[int, GrowingText] = field(default_factory=dict)
    """The text generated so far, by the index of its completion."""
    logprobs: dict[int, TokenLogprob] = field(default_factory=dict)
    """Log probabilities of the prompt's tokens, by position; emptied once they are in an output."""
    hidden: dict[int, np.ndarray] = field(default_factory=dict)
    """For each prompt chunk, by the position of its first token: its hidden states summed over its tokens [d]."""
    matchers: list[Matcher] = field(default_factory=list)
    """A matcher for each sequence if the request has a constraint, else empty."""
    deadline: float | None = None
    """Time, on the clock `time.monotonic`, at which the request is aborted; None for no limit."""
    request_id: str = ""
    ended: set[int] = field(default_factory=set)
    """Indices of the completions whose end was reported in an output."""
    ends: frozenset[int] = frozenset()
    """The request's stop tokens."""

    def begin(
        self, request_id: str, orders: Iterator[int], tokenizer: Tokenizer | None, words: int, *, is_scored: bool
    ) -> None:
        """Create the sequences: one per completion, or a single one if no token is generated (`max_tokens` 0).

        Args:
            orders: yields increasing numbers; each sequence takes the next one as its order of arrival.
            tokenizer: converts tokens to text; None to return tokens only.
            words: number of 32-bit words of a token mask (one bit per token of the vocabulary).
            is_scored: whether the first sequence computes log probabilities or hidden states of the prompt.
        """
        request, self.request_id = self.request, request_id
        self.ends = frozenset(request.stop_tokens)
        not_ends = ~bits_of(request.stop_tokens, words) if request.min_tokens else None
        for number in range(request.num_completions if request.max_tokens else 1):
            own = replace(request, sampling=replace(request.sampling, seed=(request.sampling.seed + number) % 2**32))
            first = self.sequences[0] if self.sequences else None
            sequence = TokenSequence(request_id, number, own, list(request.prompt), next(orders), first)
            sequence.is_scored = is_scored and number == 0
            sequence.not_ends, sequence.matcher = not_ends, self.matchers[number] if self.matchers else None
            self.sequences.append(sequence)
            skip = request.skip_special_tokens
            stream = TokenStream(tokenizer, skip_special_tokens=skip) if tokenizer else None
            self.growing[number] = GrowingText(stream)

    def grow(self, sequence: TokenSequence, tokens: Sequence[int], before: int) -> tuple[list[int], str]:
        """Add new tokens to a sequence's text, up to the token that ends it.

        before: number of tokens that the sequence generated before these.

        Returns:
            The tokens added, without a stop token, and the text that they add.
        """
        request, growing, kept, text = self.request, self.growing[sequence.number], list[int](), ""
        for number, token in enumerate(tokens, start=before + 1):
            text += growing.add(token, self.ends, request.stop, is_last=number >= request.max_tokens)
            if growing.done != "token":
                kept.append(token)
            if growing.done:
                break
        sequence.done = growing.done
        return kept, text

    def output(
        self,
        sequence: TokenSequence,
        tokens: tuple[int, ...],
        piece: str,
        logprobs: tuple[TokenLogprob, ...],
    ) -> Output:
        """Return a step's output for one sequence.

        Args:
            logprobs: the log probabilities of the new tokens.

        Returns:
            The output. The first one of completion 0 includes the prompt's log probabilities and mean hidden state.
        """
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

    def add_scores(self, part: SequenceRow, arrays: Sequence[np.ndarray], hidden: np.ndarray) -> None:
        """Store the log probabilities and hidden states of a chunk of the prompt.

        Args:
            arrays: the fields of `Logprobs` for the chunk's row, each indexed by the chunk's tokens.
            hidden: hidden states summed over the chunk's tokens [d].
        """
        request = self.request
        self.hidden[part.start] = hidden
        if request.prompt_logprobs is not None:
            end = min(part.start + len(part.tokens) + 1, len(request.prompt))
            for place, position in enumerate(range(part.start + 1, end)):
                own = [array[place] for array in arrays]
                self.logprobs[position] = token_logprob(request.prompt[position], own, request.prompt_logprobs)


def token_logprob(token: int, arrays: Sequence[np.ndarray], count: int) -> TokenLogprob:
    """Return a token's log probability, with the `count` likeliest tokens and their log probabilities.

    arrays: the fields of `Logprobs` at the token's position: a scalar, and two arrays [MOST_LOGPROBS].
    """
    own, values, tokens = arrays
    return TokenLogprob(token, float(own), tuple(zip(tokens[:count].tolist(), values[:count].tolist(), strict=True)))
