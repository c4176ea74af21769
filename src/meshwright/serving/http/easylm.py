"""The five endpoints of EasyLM's and LWM's servers (https://github.com/young-geng/EasyLM, docs/serving.md).

What their settings say (the words around a turn of a chat, the longest text) the model's chat template and context say
here. Temperatures are 1 where none is given, as theirs.
"""

from __future__ import annotations

import json
import math
import secrets
from collections.abc import Sequence
from typing import Annotated, Any, NamedTuple

from pydantic import BaseModel, Field

from meshwright.models import GREEDY, Sampling
from meshwright.serving.http.call import Call
from meshwright.serving.http.chat import chat_prompt
from meshwright.serving.http.endpoint import Endpoint, Host
from meshwright.serving.http.errors import ApiError
from meshwright.serving.http.fields import Fields, Texts
from meshwright.serving.http.generation import checked_max_tokens, checked_stop
from meshwright.serving.http.service import Service
from meshwright.serving.http.usage import UsageCount
from meshwright.serving.request import Output, Request
from meshwright.text import chat_template

Temperature = Annotated[float, Field(ge=0, le=100)]

TEMPERATURE = Field(1.0, description="a number from 0, which takes the likeliest token, to 100")
MAX_TOKENS = Field(None, ge=0, description="a whole number from 0; with none, what the context leaves")


class GenerateFields(Fields):
    """A request for texts after prefixes."""

    prefix_text: Texts = Field(description="a list of texts")
    temperature: Temperature = TEMPERATURE
    max_tokens: int | None = MAX_TOKENS


class Generated(BaseModel):
    """The text after each prefix."""

    prefix_text: list[str]
    output_text: list[str]
    temperature: float


class GreedyUntilFields(Fields):
    """A request for the likeliest texts after prefixes, each until its own stop text or texts."""

    prefix_text: Texts = Field(description="a list of texts")
    until: list[str | Texts] = Field(description="a list as long as prefix_text, of texts or lists of texts")
    max_length: int | None = MAX_TOKENS


class GreedyUntil(BaseModel):
    """The text after each prefix, without what ended it."""

    prefix_text: list[str]
    until: list[str | list[str]]
    max_length: int | None
    output_text: list[str]


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


class TurnFields(Fields):
    """A request for the next turn of a chat."""

    prompt: str = Field(description="the user's words")
    context: str = Field("", description="the context of the answer before; left out at the beginning of a chat")
    temperature: Temperature = TEMPERATURE
    max_tokens: int | None = MAX_TOKENS


class Turn(BaseModel):
    """The assistant's words, and what the next request gives as its context."""

    response: str
    context: str
    temperature: float


async def generate(host: Host, asked: GenerateFields) -> Generated:
    """Make a text after each prefix."""
    service = host.service
    requests = [
        _text_request(service, await service.tokens(text), asked.max_tokens, "prefix_text", asked.temperature)
        for text in _checked(service, "prefix_text", asked.prefix_text)
    ]
    return Generated(
        prefix_text=asked.prefix_text, output_text=await _texts(host, requests), temperature=asked.temperature
    )


async def greedy_until(host: Host, asked: GreedyUntilFields) -> GreedyUntil:
    """Make the likeliest text after each prefix, until a stop text of its own."""
    service = host.service
    _same_length("until", asked.until, "prefix_text", asked.prefix_text)
    requests = [
        _text_request(
            service, await service.tokens(text), asked.max_length, "prefix_text", 0.0,
            stop=checked_stop(service, until, "until"),
        )
        for text, until in zip(_checked(service, "prefix_text", asked.prefix_text), asked.until, strict=True)
    ]  # fmt: skip
    return GreedyUntil(
        prefix_text=asked.prefix_text, until=asked.until, max_length=asked.max_length,
        output_text=await _texts(host, requests),
    )  # fmt: skip


async def turn(host: Host, asked: TurnFields) -> Turn:
    """Make the next turn of a chat. Its context is its messages as JSON, or plain text without a chat template."""
    service = host.service
    tokenizer = service.needs_tokenizer("writes chats")
    if not chat_template(tokenizer):
        before = asked.context + asked.prompt
        prompt = await service.tokens(before)
        (text,) = await _texts(host, [_text_request(service, prompt, asked.max_tokens, "prompt", asked.temperature)])
        return Turn(response=text, context=before + text, temperature=asked.temperature)
    messages = _messages(asked.context)
    # What is no context of this server's is a text that the chat is about.
    said = asked.prompt if messages is not None else asked.context + asked.prompt
    messages = [*(messages or []), {"role": "user", "content": said}]
    prompt = await chat_prompt(service, messages, [], "context")
    (text,) = await _texts(host, [_text_request(service, prompt, asked.max_tokens, "prompt", asked.temperature)])
    context = json.dumps([*messages, {"role": "assistant", "content": text}], ensure_ascii=False)
    return Turn(response=text, context=context, temperature=asked.temperature)


async def loglikelihood(host: Host, asked: LoglikelihoodFields) -> Loglikelihood:
    """Score each text after its prefix."""
    service = host.service
    prefixes = [""] * len(asked.text) if asked.prefix_text is None else asked.prefix_text
    _same_length("prefix_text", prefixes, "text", asked.text)
    texts = []
    for prefix, text in zip(prefixes, _checked(service, "text", asked.text), strict=True):
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
    for text in _checked(service, "text", asked.text):
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
    for owner, window, output in zip(owners, flat, await _outputs(host, requests), strict=True):
        for token, logprob, likeliest in output.prompt_logprobs[-window.num_scored :]:
            values[owner].append(logprob)
            is_greedy[owner] &= likeliest[0][0] == token
    return [(math.fsum(of_text), greedy) for of_text, greedy in zip(values, is_greedy, strict=True)]


def _text_request(
    service: Service, prompt: list[int], max_tokens: int | None, param: str, temperature: float,
    stop: tuple[str, ...] = (),
) -> Request:  # fmt: skip
    """One text after a prompt."""
    sampling = Sampling(temperature=temperature, seed=secrets.randbits(31)) if temperature else GREEDY
    return Request(
        prompt=prompt,
        max_tokens=checked_max_tokens(service, len(prompt), max_tokens, param),
        sampling=sampling,
        stop=stop,
        stop_tokens=service.stop_tokens,
    )


async def _texts(host: Host, requests: Sequence[Request]) -> list[str]:
    return [output.text for output in await _outputs(host, requests)]


async def _outputs(host: Host, requests: Sequence[Request]) -> list[Output]:
    """The whole output of each request; they are of one text each."""
    async with Call(host.calls, requests, host.service.limits, is_streamed=False) as call:
        pieces = await call.whole()
    count = UsageCount(host.calls.metrics, requests)
    for piece in pieces:
        count.add(piece)
    count.finish()
    return [piece.output for piece in pieces]


def _checked(service: Service, name: str, texts: Texts) -> Texts:
    """A list of texts of which there are not too many."""
    if len(texts) > service.limits.prompts:
        raise ApiError(f"{name} has {len(texts)} texts; this server takes at most {service.limits.prompts}", param=name)
    return texts


def _same_length(name: str, values: Sequence[Any], other: str, others: Sequence[Any]) -> None:
    if len(values) != len(others):
        raise ApiError(f"{name} has {len(values)} and {other} {len(others)}; they are as many", param=name)


def _messages(context: str) -> list[dict[str, str]] | None:
    """The messages of a context that this server made; none of an empty one, None of another text."""
    if not context:
        return []
    try:
        found = json.loads(context)
    except (ValueError, RecursionError):
        return None
    is_ours = isinstance(found, list) and all(
        isinstance(message, dict)
        and message.keys() == {"role", "content"}
        and all(isinstance(value, str) for value in message.values())
        for message in found
    )
    return found if is_ours else None


GENERATE = Endpoint(
    path="/generate", what="Texts after prefixes (EasyLM)", fields=GenerateFields, reply=Generated, answer=generate
)
GREEDY_UNTIL = Endpoint(
    path="/greedy-until",
    what="The likeliest texts after prefixes, until stop texts (EasyLM)",
    fields=GreedyUntilFields,
    reply=GreedyUntil,
    answer=greedy_until,
)
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
TURN = Endpoint(path="/chat", what="The next turn of a chat (EasyLM)", fields=TurnFields, reply=Turn, answer=turn)
