"""Log likelihoods of texts, as EasyLM's and LWM's servers answer them (see `easylm`)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from pydantic import BaseModel, Field

from meshwright.serving.http.call import Call
from meshwright.serving.http.endpoint import Endpoint, Host
from meshwright.serving.http.errors import ApiError
from meshwright.serving.http.fields import Fields, Texts
from meshwright.serving.http.service import Service
from meshwright.serving.http.usage import UsageCount
from meshwright.serving.request import Output, Request


class LoglikelihoodFields(Fields):
    """A request for the log likelihoods of texts after prefixes."""

    prefix_text: Texts | None = Field(None, description="a list of texts, as long as text")
    text: Texts = Field(description="a list of texts")


class Loglikelihood(BaseModel):
    """Of each text: its natural log likelihood after its prefix, and whether each token is the likeliest."""

    prefix_text: list[str]
    text: list[str]
    log_likelihood: list[float]
    is_greedy: list[bool]


class RollingFields(Fields):
    """A request for the log likelihoods of whole texts, which may be longer than the context."""

    text: Texts = Field(description="a list of texts")


class Rolling(BaseModel):
    """Of each text: its natural log likelihood, and whether each token is the likeliest."""

    text: list[str]
    log_likelihood: list[float]
    is_greedy: list[bool]


async def loglikelihood(host: Host, asked: LoglikelihoodFields) -> Loglikelihood:
    """Score each text after its prefix."""
    service = host.service
    prefixes = [""] * len(asked.text) if asked.prefix_text is None else asked.prefix_text
    check_same_length("prefix_text", prefixes, "text", asked.text)
    texts = []
    for prefix, text in zip(prefixes, checked_texts(service, "text", asked.text), strict=True):
        before = await service.tokens(prefix) or _start(service)
        tokens = await service.tokens(text, add_special_tokens=False)
        if not before:
            raise ApiError(
                "a prefix_text is empty, and this tokenizer has no token that begins a text and predicts its first"
                " one; give a prefix_text of one character at least",
                param="prefix_text",
            )
        if len(tokens) >= service.context:
            raise ApiError(
                f"a text has {len(tokens)} tokens; it is predicted from one token before it at least, together at most"
                f" {service.context}: score it by /loglikelihood-rolling",
                param="text", code="context_length_exceeded",
            )  # fmt: skip
        # As evaluation harnesses do: of what is too long the beginning is left out.
        texts.append([_Window([*before, *tokens][-service.context :], len(tokens))] if tokens else [])
    scores = await _scores(host, texts)
    return Loglikelihood(
        prefix_text=prefixes, text=asked.text,
        log_likelihood=[score for score, _ in scores], is_greedy=[is_greedy for _, is_greedy in scores],
    )  # fmt: skip


async def rolling(host: Host, asked: RollingFields) -> Rolling:
    """Score each text, in windows where it is longer than the context."""
    service = host.service
    texts = []
    for text in checked_texts(service, "text", asked.text):
        tokens = await service.tokens(text, add_special_tokens=False)
        texts.append(windows([*_start(service), *tokens], service.context))
    scores = await _scores(host, texts)
    return Rolling(
        text=asked.text,
        log_likelihood=[score for score, _ in scores],
        is_greedy=[is_greedy for _, is_greedy in scores],
    )


class _Window(NamedTuple):
    """Tokens that are read together, and how many of the last ones are scored."""

    tokens: list[int]
    num_scored: int


def windows(tokens: Sequence[int], context: int) -> list[_Window]:
    """Windows of at most `context` tokens that score each token but the first once; the last one reaches back."""
    step = max(1, context - 1)
    starts = range(1, len(tokens), step)
    ends = [min(start + step, len(tokens)) for start in starts]
    return [
        _Window(list(tokens[max(0, end - context) : end]), end - start) for start, end in zip(starts, ends, strict=True)
    ]


def _start(service: Service) -> list[int]:
    """What predicts the first token of a text: what this model's texts begin with, or what ends them."""
    tokenizer = service.needs_tokenizer("reads text")
    return tokenizer.encode("") or list(tokenizer.stop_tokens[:1])


async def _scores(host: Host, texts: Sequence[Sequence[_Window]]) -> list[tuple[float, bool]]:
    """Of each text the log likelihood of what its windows score, and whether each of it is the likeliest."""
    owners = [number for number, of_text in enumerate(texts) for _ in of_text]
    flat = [window for of_text in texts for window in of_text]
    requests = [Request(prompt=window.tokens, max_tokens=0, prompt_logprobs=1) for window in flat]
    values: list[list[float]] = [[] for _ in texts]
    is_greedy = [True] * len(texts)
    for owner, window, output in zip(owners, flat, await whole_outputs(host, requests), strict=True):
        for token, logprob, likeliest in output.prompt_logprobs[-window.num_scored :]:
            values[owner].append(logprob)
            is_greedy[owner] &= likeliest[0][0] == token
    return [(math.fsum(of_text), greedy) for of_text, greedy in zip(values, is_greedy, strict=True)]


async def whole_outputs(host: Host, requests: Sequence[Request]) -> list[Output]:
    """The whole output of each request; they are of one text each."""
    async with Call(host.calls, requests, host.service.limits, is_streamed=False) as call:
        pieces = await call.whole()
    count = UsageCount(host.calls.metrics, requests)
    for piece in pieces:
        count.add(piece)
    count.finish()
    return [piece.output for piece in pieces]


def checked_texts(service: Service, name: str, texts: Texts) -> Texts:
    """The texts of a field.

    Raises:
        ApiError: more of them than the limit.
    """
    if len(texts) > service.limits.prompts:
        raise ApiError(f"{name} has {len(texts)} texts; this server takes at most {service.limits.prompts}", param=name)
    return texts


def check_same_length(name: str, values: Sequence[Any], other: str, others: Sequence[Any]) -> None:
    """Raise where two fields are not of the same length."""
    if len(values) != len(others):
        raise ApiError(f"{name} has {len(values)} and {other} {len(others)}; they are as many", param=name)


LOGLIKELIHOOD = Endpoint(
    path="/loglikelihood",
    what="Log likelihoods of texts after prefixes (EasyLM)",
    fields=LoglikelihoodFields,
    reply=Loglikelihood,
    answer=loglikelihood,
)
ROLLING = Endpoint(
    path="/loglikelihood-rolling",
    what="Log likelihoods of texts of any length (EasyLM)",
    fields=RollingFields,
    reply=Rolling,
    answer=rolling,
)
