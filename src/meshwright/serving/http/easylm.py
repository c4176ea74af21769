"""EasyLM's and LWM's endpoints that make texts; `scoring` has those that score them.

See docs/serving.md of https://github.com/young-geng/EasyLM. What their servers' settings say (the words around a turn
of a chat, the longest text) the model's chat template and context say here. Temperatures are 1 where none is given, as
theirs.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from typing import Annotated

from pydantic import BaseModel, Field

from meshwright.models import GREEDY, Sampling
from meshwright.serving.http.endpoint import Endpoint, Host
from meshwright.serving.http.fields import Fields, Texts
from meshwright.serving.http.generation import checked_max_tokens, checked_stop
from meshwright.serving.http.messages import chat_prompt
from meshwright.serving.http.scoring import check_same_length, checked_texts, whole_outputs
from meshwright.serving.http.service import Service
from meshwright.serving.request import Request
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
        for text in checked_texts(service, "prefix_text", asked.prefix_text)
    ]
    return Generated(
        prefix_text=asked.prefix_text, output_text=await _texts(host, requests), temperature=asked.temperature
    )


async def greedy_until(host: Host, asked: GreedyUntilFields) -> GreedyUntil:
    """Make the likeliest text after each prefix, until a stop text of its own."""
    service = host.service
    check_same_length("until", asked.until, "prefix_text", asked.prefix_text)
    requests = [
        _text_request(
            service, await service.tokens(text), asked.max_length, "prefix_text", 0.0,
            stop=checked_stop(service, until, "until"),
        )
        for text, until in zip(checked_texts(service, "prefix_text", asked.prefix_text), asked.until, strict=True)
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
    return [output.text for output in await whole_outputs(host, requests)]


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
TURN = Endpoint(path="/chat", what="The next turn of a chat (EasyLM)", fields=TurnFields, reply=Turn, answer=turn)
