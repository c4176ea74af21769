"""The fields that completions and chats share, and the engine's request that they make."""

from __future__ import annotations

import secrets
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from meshwright.errors import MeshwrightError
from meshwright.models import Sampling
from meshwright.serving.http.errors import ApiError
from meshwright.serving.http.fields import Fields, Texts, Tokens
from meshwright.serving.http.forms import Forms, constraint_of
from meshwright.serving.http.service import Service
from meshwright.serving.request import MOST_LOGPROBS, Request

MOST_LOGIT_BIASES = 1024
"""vLLM's."""


def _few(values: Any) -> Any:
    """Refuse an object of many fields before each of them is looked at."""
    if isinstance(values, dict) and len(values) > MOST_LOGIT_BIASES:
        raise ValueError(f"it has at most {MOST_LOGIT_BIASES}")
    return values


class StreamOptions(Fields):
    """How a stream is sent."""

    include_usage: bool = Field(False, description="whether the stream ends with the numbers of tokens")
    include_obfuscation: bool = Field(False, description="true or false; without effect")


class Generation(Forms):
    """How texts are made."""

    model: str | None = Field(None, description="the model's name, as /v1/models says it")
    n: int = Field(1, ge=1, description="a whole number from 1: how many texts are made of a prompt")
    stream: bool = Field(False, description="true or false: whether the text is sent as it is made")
    stream_options: StreamOptions | None = Field(None, description="an object with include_usage")
    temperature: float = Field(1.0, ge=0, le=2, description="a number from 0, which takes the likeliest token, to 2")
    top_p: float = Field(1.0, gt=0, le=1, description="a number above 0 and at most 1")
    top_k: int = Field(0, ge=-1, lt=2**31, description="a whole number from 1, or 0 or -1 for all tokens")
    min_p: float = Field(0.0, ge=0, le=1, description="a number from 0 to 1")
    repetition_penalty: float = Field(1.0, gt=0, le=100, description="a number above 0, where 1 is none, to 100")
    presence_penalty: float = Field(0.0, ge=-2, le=2, description="a number from -2 to 2")
    frequency_penalty: float = Field(0.0, ge=-2, le=2, description="a number from -2 to 2")
    seed: int | None = Field(
        None, ge=-(2**63), lt=2**63, description="a whole number of 64 bits; with none, a random one"
    )
    stop: str | Texts = Field([], description="a text or a list of texts")
    stop_token_ids: Tokens = Field([], description="a list of tokens")
    ignore_eos: bool = Field(False, description="true or false: whether the text goes on behind tokens that end it")
    min_tokens: int = Field(0, ge=0, description="the tokens before which nothing ends a text, a whole number from 0")
    logit_bias: Annotated[dict[str, Annotated[float, Field(ge=-100, le=100)]], BeforeValidator(_few)] = Field(
        {}, description=f"an object: numbers from -100 to 100 by tokens as text, at most {MOST_LOGIT_BIASES}"
    )
    return_token_ids: bool = Field(False, description="true or false: whether the tokens are in the answer too")

    @property
    def has_usage(self) -> bool:
        """Whether a stream ends with the numbers of tokens."""
        return self.stream_options is not None and self.stream_options.include_usage


def engine_request(
    asked: Generation, service: Service, prompt: list[int], *, max_tokens: int | None, logprobs: int | None,
    prompt_logprobs: int | None = None, usual_tokens: int | None = None, param: str = "prompt",
) -> Request:  # fmt: skip
    """What the engine is asked for one prompt.

    Args:
        max_tokens: of each text; None for what the context leaves, at most `usual_tokens`. param: the prompt's field.

    Raises:
        ApiError: what is over a limit, or cannot be together.
    """
    return Request(
        prompt=prompt,
        max_tokens=checked_max_tokens(service, len(prompt), max_tokens, param, usual_tokens),
        sampling=_sampling(asked),
        num_texts=_at_most("n", asked.n, service.limits.texts),
        stop=checked_stop(service, asked.stop),
        stop_tokens=(*asked.stop_token_ids, *(() if asked.ignore_eos else service.stop_tokens)),
        min_tokens=asked.min_tokens,
        logit_bias=_logit_bias(asked),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        constraint=constraint_of(asked),
    )


def checked_max_tokens(
    service: Service, prompt: int, max_tokens: int | None, param: str, usual: int | None = None
) -> int:
    """The most tokens of a text after a prompt of so many tokens.

    Args:
        max_tokens: that were asked for; None for what the context and the server's limit leave, at most `usual`.
        param: the prompt's field.

    Raises:
        ApiError: an empty prompt, or more than the context or the server's limit takes.
    """
    left = service.context - prompt
    most = service.limits.max_tokens
    if not prompt:
        raise ApiError(f"a text of {param} has no token; it has one at least", param=param)
    if left < (max_tokens if max_tokens is not None else 1):
        raise ApiError(
            f"{param} has {prompt} tokens and max_tokens is {1 if max_tokens is None else max_tokens}; they are at most"
            f" {service.context} together, the context of {service.model}",
            param=param, code="context_length_exceeded",
        )  # fmt: skip
    if max_tokens is None:
        return min(value for value in (left, most, usual) if value is not None)
    return max_tokens if most is None else _at_most("max_tokens", max_tokens, most)


def checked_logprobs(name: str, logprobs: int | None) -> int | None:
    """How many alternatives are asked for, if at most `MOST_LOGPROBS`."""
    return None if logprobs is None else _at_most(name, logprobs, MOST_LOGPROBS)


def checked_stop(service: Service, stop: str | list[str], param: str = "stop") -> tuple[str, ...]:
    """The texts of a field that end a text.

    Raises:
        ApiError: too many, one that is too long or empty, or no tokenizer.
    """
    texts = (stop,) if isinstance(stop, str) else tuple(stop)
    if texts:
        service.needs_tokenizer("finds stop texts")
    _at_most(f"the number of texts of {param}", len(texts), service.limits.stop_texts, param=param)
    for text in texts:
        _at_most(
            f"the number of characters of a text of {param}", len(text), service.limits.stop_characters, param=param
        )
        if not text:
            raise ApiError(f"a text of {param} is empty, which every text begins with; leave it out", param=param)
    return texts


def _sampling(asked: Generation) -> Sampling:
    # The texts of a request have seeds that follow each other, all below 2**32.
    seed = secrets.randbits(31) if asked.seed is None else asked.seed % 2**31
    try:
        return Sampling(
            temperature=asked.temperature,
            top_k=max(asked.top_k, 0),
            top_p=asked.top_p,
            min_p=asked.min_p,
            repetition_penalty=asked.repetition_penalty,
            presence_penalty=asked.presence_penalty,
            frequency_penalty=asked.frequency_penalty,
            seed=seed,
        )
    except MeshwrightError as error:
        raise ApiError(str(error)) from None


def _logit_bias(asked: Generation) -> tuple[tuple[int, float], ...]:
    for token in asked.logit_bias:
        if not (token.isascii() and token.isdigit() and len(token) < 10):
            raise ApiError(f"logit_bias has {token[:40]!r}; it has tokens, as '42'", param="logit_bias")
    return tuple((int(token), bias) for token, bias in asked.logit_bias.items())


def _at_most(name: str, value: int, most: int, *, param: str | None = None) -> int:
    if value > most:
        raise ApiError(f"{name} is {value}; this server takes at most {most}", param=param or name)
    return value
