"""What clients ask of the engine, and what it answers: no JAX, no HTTP."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

from meshwright.errors import MeshwrightError
from meshwright.models import GREEDY, Sampling

MOST_LOGPROBS = 20
"""The alternatives of a token whose log probabilities can be asked for: the most of OpenAI's chat completions."""

Ending = Literal["length", "token", "text", "aborted", "failed"]
"""Why a text ends: its limit of tokens, a token or a text that stops it, its client, a fault of the engine."""


class OverloadedError(MeshwrightError):
    """The queue is full: ask again after `retry_seconds`."""

    def __init__(self, message: str, retry_seconds: float) -> None:
        super().__init__(message)
        self.retry_seconds = retry_seconds


class ClosedError(MeshwrightError):
    """The engine takes no more requests: it is shutting down, or has failed."""


@dataclass(frozen=True)
class Constraint:
    """What a text has to match. kind: a JSON schema as text, a regular expression, or a Lark grammar."""

    kind: Literal["json_schema", "regex", "lark"]
    source: str


@dataclass(frozen=True, kw_only=True)
class Request:
    """One prompt, and how its texts are made.

    Args:
        prompt: its tokens, at least one.
        max_tokens: the most tokens of each text; 0 reads the prompt only.
        num_texts: how many texts are made of it, each with a seed of its own: `sampling.seed` + its number.
        stop: texts that end a text. stop_tokens: tokens that do. min_tokens: before so many no token ends a text.
        logit_bias: what is added to the logits of tokens.
        logprobs: for each token made, of how many of the likeliest the log probabilities are wanted beside its own;
            None for none. prompt_logprobs: the same of each token of the prompt but the first.
        pooled: whether the mean of the prompt's hidden states is wanted.
        constraint: what each text has to match.
        timeout_seconds: after which the request is aborted, from when it was submitted.
    """

    prompt: Sequence[int]
    max_tokens: int
    sampling: Sampling = GREEDY
    num_texts: int = 1
    stop: tuple[str, ...] = ()
    stop_tokens: tuple[int, ...] = ()
    min_tokens: int = 0
    logit_bias: tuple[tuple[int, float], ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    pooled: bool = False
    constraint: Constraint | None = None
    timeout_seconds: float | None = None


class TokenLogprob(NamedTuple):
    """The natural logarithm of a token's probability, and those of the likeliest tokens in its place."""

    token: int
    logprob: float
    likeliest: tuple[tuple[int, float], ...]


@dataclass(frozen=True, kw_only=True)
class Output:
    """What a step adds to one text of a request.

    Args:
        text_number: which of its texts.
        tokens: new tokens; the one that ended the text is not among them.
        text: what they add; ends with a whole character, and never with what may begin a stop text.
        logprobs: of each new token, where asked for; the logits' before penalties and temperature.
        done: why the text ends here; None where more follows. stop: the text of `Request.stop` that ended it.
        error: what failed, where done is "failed".
        cached_tokens: the tokens of the prompt that were not computed anew; in a text's first output.
        prompt_logprobs: of the prompt's tokens from the second on; in the first output of text 0.
        pooled: the mean hidden state of the prompt; in the first output of text 0.
    """

    text_number: int
    tokens: tuple[int, ...] = ()
    text: str = ""
    logprobs: tuple[TokenLogprob, ...] = ()
    done: Ending | None = None
    stop: str | None = None
    error: str = ""
    cached_tokens: int = 0
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    pooled: tuple[float, ...] = ()


class Deliver(Protocol):
    """Takes the outputs of a request as they are made; called on the engine's thread, so that it returns at once."""

    def __call__(self, outputs: Sequence[Output]) -> None:
        """Take some outputs."""


class Serves(Protocol):
    """What HTTP needs of an engine."""

    def submit(self, request: Request, deliver: Deliver) -> str:
        """Queue a request: the id by which it can be aborted.

        Raises:
            MeshwrightError: a request that cannot be answered, with what would be right. OverloadedError: a full queue.
            Closed: an engine that is shutting down or has failed.
        """
        ...

    def abort(self, request_id: str) -> None:
        """End a request and free its pages; nothing where it has ended."""
        ...
