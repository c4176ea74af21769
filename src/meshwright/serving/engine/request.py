"""The engine's interface: requests, outputs and errors; independent of JAX and HTTP."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

from meshwright.errors import MeshwrightError
from meshwright.execution.models.generation.sampling import GREEDY, Sampling

MOST_LOGPROBS = 20
"""Maximum number of alternatives with log probabilities per token, as in OpenAI's chat completions."""

MOST_STOP_TOKENS = 1024
"""Maximum number of stop tokens of a request, the same as of logit biases."""

Ending = Literal["length", "token", "text", "aborted", "failed", "refused"]
"""Why a completion ended, in this order.

It reached max_tokens, a stop token or a stop string; its client, a timeout or the shutdown aborted it; it failed in the
engine; or it cannot continue, for example because its constraint allows no token.
"""


class OverloadedError(MeshwrightError):
    """The queue is full; retry after `retry_seconds`."""

    def __init__(self, message: str, retry_seconds: float) -> None:
        super().__init__(message)
        self.retry_seconds = retry_seconds


class UnknownAdapterError(MeshwrightError):
    """The adapter of a request is not loaded any more."""


class ClosedError(MeshwrightError):
    """The engine accepts no more requests: it is shutting down, or has failed."""


class Adapter(NamedTuple):
    """A loaded low-rank adapter: its name, its slot from 1, and a version unique to each load."""

    name: str
    slot: int
    version: int


@dataclass(frozen=True)
class Constraint:
    """A constraint on a completion: a JSON schema as text, a regular expression, or a Lark grammar."""

    kind: Literal["json_schema", "regex", "lark"]
    source: str


@dataclass(frozen=True, kw_only=True)
class Request:
    """One prompt, and how to generate its completions.

    Args:
        prompt: the prompt's tokens, at least one.
        max_tokens: maximum tokens of each completion; 0 only processes the prompt.
        sampling: temperature, penalties, seed and other options; completion i has the seed `sampling.seed` + i.
        num_completions: number of completions (`n`).
        stop: stop strings.
        stop_tokens: tokens that end a completion.
        min_tokens: minimum tokens of a completion before a token may end it.
        logit_bias: token ids, each with a number that is added to its logit.
        logprobs: number of likeliest tokens to return with each generated token's log probability; None for no log
            probabilities.
        prompt_logprobs: the same for each token of the prompt except the first.
        pooled: whether to return the mean of the prompt's hidden states over its tokens.
        constraint: a constraint on each completion.
        skip_special_tokens: whether texts leave out the tokenizer's special tokens.
        timeout_seconds: time after `submit` at which the request is aborted.
        owner: the client. Rows are shared fairly between owners, and each owner's constraints have their own queue.
        group: requests of one group share rows like a single request; by default each request is a group.
        cache_salt: only requests with the same salt and adapter share cached prefixes.
        adapter: a loaded adapter; None for the model alone.
    """

    prompt: Sequence[int]
    max_tokens: int
    sampling: Sampling = GREEDY
    num_completions: int = 1
    stop: tuple[str, ...] = ()
    stop_tokens: tuple[int, ...] = ()
    min_tokens: int = 0
    logit_bias: tuple[tuple[int, float], ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    pooled: bool = False
    constraint: Constraint | None = None
    skip_special_tokens: bool = True
    timeout_seconds: float | None = None
    owner: str = ""
    group: str = ""
    cache_salt: str = ""
    adapter: Adapter | None = None


class TokenLogprob(NamedTuple):
    """A token's natural log probability, and the likeliest tokens at its position."""

    token: int
    logprob: float
    likeliest: tuple[tuple[int, float], ...]  # (token, log probability), likeliest first.


@dataclass(frozen=True, kw_only=True)
class Output:
    """New tokens of one completion of a request, from one step.

    Args:
        completion: index of the completion.
        tokens: new tokens, without the one that ended the completion.
        text: their text. Incomplete characters, and what may be the beginning of a stop string, are held back.
        logprobs: log probabilities of each new token, if requested; from the logits before penalties and temperature.
        done: why the completion ended here; None while it continues.
        stop: the stop string that ended it.
        error: what failed, if done is "failed" or "refused".
        cached_tokens: prompt tokens from the prefix cache; in a completion's first output.
        prompt_logprobs: for the prompt's tokens from the second on; in the first output of completion 0.
        pooled: the mean hidden state of the prompt; in the first output of completion 0.
    """

    completion: int
    tokens: tuple[int, ...] = ()
    text: str = ""
    logprobs: tuple[TokenLogprob, ...] = ()
    done: Ending | None = None
    stop: str | None = None
    error: str = ""
    cached_tokens: int = 0
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    pooled: tuple[float, ...] = ()


class OutputCallback(Protocol):
    """A function that the engine's thread calls with new outputs of a request. It must return at once."""

    def __call__(self, outputs: Sequence[Output]) -> None:
        """Handle new outputs."""


class EngineClient(Protocol):
    """The methods of an engine that the HTTP server uses."""

    def submit(self, request: Request, deliver: OutputCallback) -> str:
        """Queue a request. Return an id for `abort`.

        Raises:
            MeshwrightError: the request is invalid.
            OverloadedError: the queue is full.
            ClosedError: the engine is shutting down or has failed.
        """
        ...

    def abort(self, request_id: str) -> None:
        """End a request and free its pages, unless it has ended already."""
        ...
