"""The request fields that completions and chat completions share, and their conversion to an engine request."""

from __future__ import annotations

import secrets
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from meshwright.errors import MeshwrightError
from meshwright.execution.models.generation.sampling import Sampling
from meshwright.serving.engine.request import MOST_LOGPROBS, Constraint, Request
from meshwright.serving.http.errors import ApiError
from meshwright.serving.http.openai.structured_outputs import StructuredOutputFields, requested_constraint
from meshwright.serving.http.request_body import RequestModel, Texts, Tokens
from meshwright.serving.http.service import Service

MAX_LOGIT_BIASES = 1024
"""Maximum number of logit biases, as in vLLM."""


def _check_num_biases(values: Any) -> Any:
    """Refuse an object with too many logit biases before pydantic validates each of them."""
    if isinstance(values, dict) and len(values) > MAX_LOGIT_BIASES:
        raise ValueError(f"it may have at most {MAX_LOGIT_BIASES}")
    return values


class StreamOptions(RequestModel):
    """Options of a stream."""

    include_usage: bool = Field(False, description="true or false: whether the stream ends with the usage")
    include_obfuscation: bool = Field(False, description="true or false; without effect")


class GenerationRequest(StructuredOutputFields):
    """Fields that both completions and chat completions have."""

    model: str | None = Field(None, description="the model's name, as in /v1/models")
    n: int = Field(1, ge=1, lt=2**31, description="a whole number from 1: how many completions to generate")
    stream: bool = Field(False, description="true or false: whether to stream the output")
    stream_options: StreamOptions | None = Field(None, description="an object with include_usage")
    temperature: float = Field(1.0, ge=0, le=2, description="a number from 0 (greedy) to 2")
    top_p: float = Field(1.0, gt=0, le=1, description="a number above 0 and at most 1")
    top_k: int = Field(0, ge=-1, lt=2**31, description="a whole number from 1, or 0 or -1 for all tokens")
    min_p: float = Field(0.0, ge=0, le=1, description="a number from 0 to 1")
    repetition_penalty: float = Field(1.0, gt=0, le=100, description="a number above 0, at most 100; 1 for no penalty")
    presence_penalty: float = Field(0.0, ge=-2, le=2, description="a number from -2 to 2")
    frequency_penalty: float = Field(0.0, ge=-2, le=2, description="a number from -2 to 2")
    seed: int | None = Field(None, ge=-(2**63), lt=2**63, description="a 64-bit whole number; random without it")
    stop: str | Texts = Field([], description="a text or a list of texts")
    stop_token_ids: Tokens = Field([], description="a list of token ids")
    ignore_eos: bool = Field(False, description="true or false: whether to continue after end-of-sequence tokens")
    min_tokens: int = Field(
        0, ge=0, lt=2**31, description="a whole number from 0: tokens to generate before any can end the output"
    )
    logit_bias: Annotated[dict[str, Annotated[float, Field(ge=-100, le=100)]], BeforeValidator(_check_num_biases)] = (
        Field({}, description=f"an object of at most {MAX_LOGIT_BIASES} numbers from -100 to 100 by token id")
    )
    skip_special_tokens: bool = Field(True, description="true or false: whether texts leave out special tokens")
    spaces_between_special_tokens: bool = Field(True, description="true or false; without effect")
    include_stop_str_in_output: bool = Field(
        False, description="true or false: whether the text ends with the stop string that ended it"
    )
    truncate_prompt_tokens: int | None = Field(
        None,
        ge=-1,
        lt=2**31,
        description="a whole number from 1: keep only so many tokens at the end of the prompt; -1: as many as fit",
    )
    cache_salt: str = Field(
        "", max_length=1024, description="a text of at most 1024 characters: only requests with the same share prefixes"
    )
    return_token_ids: bool = Field(False, description="true or false: whether to return token ids too")

    @property
    def has_usage(self) -> bool:
        """Whether a stream ends with the usage."""
        return self.stream_options is not None and self.stream_options.include_usage


def engine_request(
    body: GenerationRequest, service: Service, prompt: list[int], *, max_tokens: int | None, logprobs: int | None,
    prompt_logprobs: int | None = None, default_max_tokens: int | None = None, param: str = "prompt",
    forced: Constraint | None = None,
) -> Request:  # fmt: skip
    """Convert the body of an HTTP request to the engine's request for one prompt.

    Args:
        body: the HTTP request's body.
        service: the server, for its limits.
        prompt: the prompt's tokens.
        max_tokens: maximum tokens of each completion; None for as many as the context allows.
        logprobs: likeliest tokens to return per generated token; None for no log probabilities.
        prompt_logprobs: likeliest tokens to return per token of the prompt; None for no log probabilities.
        default_max_tokens: maximum that applies if max_tokens is None.
        param: the field of the prompt, for errors.
        forced: a constraint that forces a tool call. The body must not have another constraint then.

    Raises:
        ApiError: a value exceeds a limit, or values contradict each other.
    """
    prompt = truncated(service, prompt, body.truncate_prompt_tokens, max_tokens)
    constraint = requested_constraint(body)
    if forced is not None and constraint is not None:
        raise ApiError(
            "tool_choice forces a tool call, and the output is constrained too; give one", param="tool_choice"
        )
    count, limit = len(body.stop_token_ids), service.limits.stop_tokens
    _at_most("the number of tokens in stop_token_ids", count, limit, param="stop_token_ids")
    for token in body.logit_bias:
        if not (token.isascii() and token.isdigit() and len(token) < 10):
            raise ApiError(f"logit_bias has the key {token[:40]!r}; keys are token ids, as '42'", param="logit_bias")
    return Request(
        prompt=prompt,
        max_tokens=resolve_max_tokens(service, len(prompt), max_tokens, param, default_max_tokens),
        sampling=_sampling(body),
        num_completions=_at_most("n", body.n, service.limits.choices),
        stop=check_stop(service, body.stop),
        stop_tokens=(*body.stop_token_ids, *(() if body.ignore_eos else service.stop_tokens)),
        min_tokens=body.min_tokens,
        logit_bias=tuple((int(token), bias) for token, bias in body.logit_bias.items()),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        constraint=forced or constraint,
        skip_special_tokens=body.skip_special_tokens,
        cache_salt=body.cache_salt,
    )


def truncated(service: Service, prompt: list[int], most: int | None, max_tokens: int | None = None) -> list[int]:
    """Return the end of a prompt, as vLLM's field `truncate_prompt_tokens` asks.

    Args:
        service: the server, for its context.
        prompt: the prompt's tokens.
        most: number of tokens kept; -1 for as many as the context allows besides the completion; None for all.
        max_tokens: tokens of the completion for which -1 leaves space; None for one.

    Raises:
        ApiError: `most` is 0.
    """
    if most == 0:
        raise ApiError("truncate_prompt_tokens is 0; a prompt has at least one token", param="truncate_prompt_tokens")
    if most == -1:
        most = max(1, service.context - (1 if max_tokens is None else max_tokens))
    return prompt if most is None else prompt[-most:]


def resolve_max_tokens(
    service: Service, prompt_len: int, max_tokens: int | None, param: str, default: int | None = None
) -> int:
    """Return the maximum number of tokens to generate after a prompt.

    Args:
        service: the server, for its context and limit.
        prompt_len: tokens of the prompt.
        max_tokens: the requested maximum; None for as many as the context and the server's limit allow.
        param: the field of the prompt, for errors.
        default: maximum that applies if max_tokens is None.

    Raises:
        ApiError: the prompt is empty, or there are more tokens than the context or the server's limit allows.
    """
    left = service.context - prompt_len
    limit = service.limits.max_tokens
    if not prompt_len:
        raise ApiError(f"a prompt in {param} has no tokens; it needs at least one", param=param)
    service.check_num_tokens(param, prompt_len)
    if left < (max_tokens if max_tokens is not None else 1):
        raise ApiError(
            f"{param} has {prompt_len} tokens{'' if max_tokens is None else f' and max_tokens is {max_tokens}'}; the"
            f" context of {service.model} is {service.context} tokens, prompt and completion together",
            param=param, code="context_length_exceeded",
        )  # fmt: skip
    if max_tokens is None:
        return min(value for value in (left, limit, default) if value is not None)
    return max_tokens if limit is None else _at_most("max_tokens", max_tokens, limit)


def check_logprobs(name: str, logprobs: int | None) -> int | None:
    """Return `logprobs`, a requested number of likeliest tokens; raise an `ApiError` if it exceeds `MOST_LOGPROBS`."""
    return None if logprobs is None else _at_most(name, logprobs, MOST_LOGPROBS)


def check_stop(service: Service, stop: str | list[str], param: str = "stop") -> tuple[str, ...]:
    """Return the stop strings of a field.

    Raises:
        ApiError: there are too many, one is too long or empty, or the model has no tokenizer.
    """
    strings = (stop,) if isinstance(stop, str) else tuple(stop)
    if strings:
        service.require_tokenizer("a stop string")
    _at_most(f"the number of stop strings in {param}", len(strings), service.limits.stop_strings, param=param)
    for string in strings:
        limit = service.limits.stop_characters
        _at_most(f"the number of characters of a stop string in {param}", len(string), limit, param=param)
        if not string:
            raise ApiError(f"a stop string in {param} is empty; leave it out", param=param)
    return strings


def _sampling(body: GenerationRequest) -> Sampling:
    # Completion i has the seed plus i, which must stay below 2**32.
    seed = secrets.randbits(31) if body.seed is None else body.seed % 2**31
    try:
        return Sampling(
            temperature=body.temperature,
            top_k=max(body.top_k, 0),
            top_p=body.top_p,
            min_p=body.min_p,
            repetition_penalty=body.repetition_penalty,
            presence_penalty=body.presence_penalty,
            frequency_penalty=body.frequency_penalty,
            seed=seed,
        )
    except MeshwrightError as error:
        raise ApiError(str(error)) from None


def _at_most(name: str, value: int, limit: int, *, param: str | None = None) -> int:
    if value > limit:
        raise ApiError(f"{name} is {value}; this server accepts at most {limit}", param=param or name)
    return value
