"""EasyLM's and LWM's endpoints that score text: `/loglikelihood` and `/loglikelihood-rolling`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from pydantic import BaseModel, Field

from meshwright.serving.engine.request import Output, Request
from meshwright.serving.http.async_engine import OutputStream
from meshwright.serving.http.endpoint import AppState, Endpoint
from meshwright.serving.http.errors import ApiError
from meshwright.serving.http.openai.responses import UsageCounter
from meshwright.serving.http.request_body import RequestModel, Texts
from meshwright.serving.http.service import Service


class LoglikelihoodRequest(RequestModel):
    """The request body of `/loglikelihood`."""

    prefix_text: Texts | None = Field(None, description="a list of texts, as long as text")
    text: Texts = Field(description="a list of texts")


class LoglikelihoodResponse(BaseModel):
    """The response body of `/loglikelihood`: per text, its natural log likelihood, and whether it is the greedy one."""

    prefix_text: list[str]
    text: list[str]
    log_likelihood: list[float]
    is_greedy: list[bool]


class RollingRequest(RequestModel):
    """The request body of `/loglikelihood-rolling`: texts that may be longer than the context."""

    text: Texts = Field(description="a list of texts")


class RollingResponse(BaseModel):
    """The response body of `/loglikelihood-rolling`; see `LoglikelihoodResponse`."""

    text: list[str]
    log_likelihood: list[float]
    is_greedy: list[bool]


async def loglikelihood(state: AppState, body: LoglikelihoodRequest) -> LoglikelihoodResponse:
    """Return the log likelihood of each text after its prefix.

    Raises:
        ApiError: a prefix is empty and there is no beginning-of-sequence token, or a text exceeds the context.
    """
    service = state.service
    prefixes = [""] * len(body.text) if body.prefix_text is None else body.prefix_text
    service.check_num_prompts("text", len(body.text))
    check_same_length("prefix_text", prefixes, "text", body.text)
    texts = []
    for prefix, text in zip(prefixes, body.text, strict=True):
        # A prefix may be too long: its beginning is cut below.
        prefix_tokens = await service.tokens(prefix, "prefix_text") or _start(service)
        tokens = await service.tokens(text, "text", most=service.context, add_special_tokens=False)
        service.check_num_tokens("text", len(tokens))
        service.check_num_tokens("prefix_text", len(prefix_tokens))
        if not prefix_tokens:
            raise ApiError(
                "a prefix_text is empty, and this tokenizer has no beginning-of-sequence token to predict the first"
                " token from; give a prefix_text of at least one character",
                param="prefix_text",
            )
        if len(tokens) >= service.context:
            raise ApiError(
                f"a text has {len(tokens)} tokens; with at least one token of prefix it exceeds the context of"
                f" {service.context}: score it with /loglikelihood-rolling",
                param="text", code="context_length_exceeded",
            )  # fmt: skip
        # A sequence that is too long loses its beginning, as in evaluation harnesses.
        texts.append([_Window([*prefix_tokens, *tokens][-service.context :], len(tokens))] if tokens else [])
    scores = await _scores(state, texts)
    return LoglikelihoodResponse(
        prefix_text=prefixes, text=body.text,
        log_likelihood=[score for score, _ in scores], is_greedy=[is_greedy for _, is_greedy in scores],
    )  # fmt: skip


async def loglikelihood_rolling(state: AppState, body: RollingRequest) -> RollingResponse:
    """Return the log likelihood of each text, computed in windows if it is longer than the context."""
    service = state.service
    service.check_num_prompts("text", len(body.text))
    texts = []
    for text in body.text:
        tokens = await service.tokens(text, "text", add_special_tokens=False)
        service.check_num_tokens("text", len(tokens))
        texts.append(windows([*_start(service), *tokens], service.context))
    scores = await _scores(state, texts)
    return RollingResponse(
        text=body.text,
        log_likelihood=[score for score, _ in scores],
        is_greedy=[is_greedy for _, is_greedy in scores],
    )


class _Window(NamedTuple):
    """A sequence whose last `num_scored` tokens are scored."""

    tokens: list[int]
    num_scored: int


def windows(tokens: Sequence[int], context: int) -> list[_Window]:
    """Split a sequence into windows of at most `context` tokens that score each token except the first exactly once.

    If there are several windows, the last one is full too: it overlaps the one before it.
    """
    step = max(1, context - 1)
    starts = range(1, len(tokens), step)
    ends = [min(start + step, len(tokens)) for start in starts]
    return [
        _Window(list(tokens[max(0, end - context) : end]), end - start) for start, end in zip(starts, ends, strict=True)
    ]


def _start(service: Service) -> list[int]:
    """Return the tokens to put before a text: beginning-of-sequence, else end-of-sequence, else none."""
    tokenizer = service.require_tokenizer("a prompt of text")
    return tokenizer.encode("") or list(tokenizer.stop_tokens[:1])


async def _scores(state: AppState, texts: Sequence[Sequence[_Window]]) -> list[tuple[float, bool]]:
    """Return each text's log likelihood, and whether each of its tokens is the likeliest. texts: their windows."""
    owners = [number for number, text_windows in enumerate(texts) for _ in text_windows]
    flat = [window for text_windows in texts for window in text_windows]
    requests = [Request(prompt=window.tokens, max_tokens=0, prompt_logprobs=1) for window in flat]
    logprobs: list[list[float]] = [[] for _ in texts]
    is_greedy = [True] * len(texts)
    for owner, window, output in zip(owners, flat, await run_requests(state, requests), strict=True):
        for token, logprob, likeliest in output.prompt_logprobs[-window.num_scored :]:
            logprobs[owner].append(logprob)
            is_greedy[owner] &= likeliest[0][0] == token
    return [(math.fsum(values), greedy) for values, greedy in zip(logprobs, is_greedy, strict=True)]


async def run_requests(state: AppState, requests: Sequence[Request]) -> list[Output]:
    """Run requests that have one completion each, and count their tokens. Return one output per request, in order."""
    async with OutputStream(state.async_engine, requests, state.service, is_streamed=False) as stream:
        parts = await stream.collect()
    usage = UsageCounter(state.async_engine.metrics, requests)
    for part in parts:
        usage.add(part)
    usage.finish()
    return [part.output for part in parts]


def check_same_length(name: str, values: Sequence[Any], other: str, others: Sequence[Any]) -> None:
    """Raise an `ApiError` if two fields, `name` and `other`, have different lengths."""
    if len(values) != len(others):
        raise ApiError(
            f"{name} has {len(values)} items and {other} has {len(others)}; they must be equally many", param=name
        )


LOGLIKELIHOOD = Endpoint(
    path="/loglikelihood",
    summary="Log likelihoods of texts after prefixes (EasyLM)",
    request=LoglikelihoodRequest,
    response=LoglikelihoodResponse,
    handler=loglikelihood,
)
LOGLIKELIHOOD_ROLLING = Endpoint(
    path="/loglikelihood-rolling",
    summary="Log likelihoods of texts of any length (EasyLM)",
    request=RollingRequest,
    response=RollingResponse,
    handler=loglikelihood_rolling,
)
