"""EasyLM's and LWM's endpoints that generate text: `/generate`, `/greedy-until` and `/chat`.

See docs/serving.md of https://github.com/young-geng/EasyLM. EasyLM's servers have settings for the text around a chat
turn and for the maximum length; here the model's chat template and context determine them. The default temperature is
1, as in EasyLM.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from typing import Annotated

from pydantic import BaseModel, Field

from meshwright.execution.models.generation.sampling import GREEDY, Sampling
from meshwright.execution.text.chat import chat_template
from meshwright.serving.engine.request import Request
from meshwright.serving.http.easylm.loglikelihood import check_same_length, run_requests
from meshwright.serving.http.endpoint import AppState, Endpoint
from meshwright.serving.http.openai.generation import check_stop, resolve_max_tokens
from meshwright.serving.http.openai.messages import chat_prompt
from meshwright.serving.http.request_body import RequestModel, Texts
from meshwright.serving.http.service import Service

Temperature = Annotated[float, Field(ge=0, le=100)]

TEMPERATURE = Field(1.0, description="a number from 0 (greedy) to 100")
MAX_TOKENS = Field(None, ge=0, lt=2**31, description="a whole number from 0; without it, as many as the context allows")


class GenerateRequest(RequestModel):
    """The request body of `/generate`."""

    prefix_text: Texts = Field(description="a list of texts")
    temperature: Temperature = TEMPERATURE
    max_tokens: int | None = MAX_TOKENS


class GenerateResponse(BaseModel):
    """The response body of `/generate`: the text generated after each prefix."""

    prefix_text: list[str]
    output_text: list[str]
    temperature: float


class GreedyUntilRequest(RequestModel):
    """The request body of `/greedy-until`: prefixes, each with its own stop strings."""

    prefix_text: Texts = Field(description="a list of texts")
    until: list[str | Texts] = Field(
        description="a list as long as prefix_text, of stop strings or lists of stop strings"
    )
    max_length: int | None = MAX_TOKENS


class GreedyUntilResponse(BaseModel):
    """The response body of `/greedy-until`: the text after each prefix, without the stop string."""

    prefix_text: list[str]
    until: list[str | list[str]]
    max_length: int | None
    output_text: list[str]


class ChatTurnRequest(RequestModel):
    """The request body of `/chat`."""

    prompt: str = Field(description="the user's message")
    context: str = Field(
        "", description="the context field of the previous response; left out at the beginning of a chat"
    )
    temperature: Temperature = TEMPERATURE
    max_tokens: int | None = MAX_TOKENS


class ChatTurn(BaseModel):
    """The response body of `/chat`. context: the chat so far, for the client to send with its next request."""

    response: str
    context: str
    temperature: float


async def generate(state: AppState, body: GenerateRequest) -> GenerateResponse:
    """Generate text after each prefix."""
    service = state.service
    service.check_num_prompts("prefix_text", len(body.prefix_text))
    requests = [
        _text_request(
            service,
            await service.tokens(text, "prefix_text", most=service.context),
            body.max_tokens,
            "prefix_text",
            body.temperature,
        )
        for text in body.prefix_text
    ]
    return GenerateResponse(
        prefix_text=body.prefix_text, output_text=await _generate(state, requests), temperature=body.temperature
    )


async def greedy_until(state: AppState, body: GreedyUntilRequest) -> GreedyUntilResponse:
    """Generate greedily after each prefix, until one of its stop strings."""
    service = state.service
    service.check_num_prompts("prefix_text", len(body.prefix_text))
    check_same_length("until", body.until, "prefix_text", body.prefix_text)
    requests = [
        _text_request(
            service, await service.tokens(text, "prefix_text", most=service.context), body.max_length, "prefix_text",
            temperature=0.0, stop=check_stop(service, until, "until"),
        )
        for text, until in zip(body.prefix_text, body.until, strict=True)
    ]  # fmt: skip
    return GreedyUntilResponse(
        prefix_text=body.prefix_text, until=body.until, max_length=body.max_length,
        output_text=await _generate(state, requests),
    )  # fmt: skip


async def chat_turn(state: AppState, body: ChatTurnRequest) -> ChatTurn:
    """Generate the next turn of a chat.

    The field `context` is the messages as JSON, or plain text if the model has no chat template. As in EasyLM, a chat
    that is too long loses its beginning; with a chat template, it loses whole turns.
    """
    service = state.service
    tokenizer, limit = service.require_tokenizer("a chat"), service.limits.prompt_tokens
    rest = service.context // 2 if body.max_tokens is None else service.context - body.max_tokens
    most = max(1, rest if limit is None else min(rest, limit))
    if not chat_template(tokenizer):
        transcript = body.context + body.prompt
        prompt = (await service.tokens(transcript, "prompt", kept=most))[-most:]
        (text,) = await _generate(state, [_text_request(service, prompt, body.max_tokens, "prompt", body.temperature)])
        return ChatTurn(response=text, context=transcript + text, temperature=body.temperature)
    messages = _messages(body.context)
    # A context that is not from this server is treated as text that precedes the message.
    content = body.prompt if messages is not None else body.context + body.prompt
    messages = [*(messages or []), {"role": "user", "content": content}]
    prompt = await _end_of_chat(service, messages, most)
    (text,) = await _generate(state, [_text_request(service, prompt, body.max_tokens, "prompt", body.temperature)])
    context = json.dumps([*messages, {"role": "assistant", "content": text}], ensure_ascii=False)
    return ChatTurn(response=text, context=context, temperature=body.temperature)


async def _end_of_chat(service: Service, messages: list[dict[str, str]], most: int) -> list[int]:
    """Return the prompt of as many last turns of a chat as fit in `most` tokens; if none fits, the last one's end."""

    async def prompt_from(first: int) -> list[int]:
        return await chat_prompt(service, messages[first:], "context", most=None, kept=most + 1)

    prompt = await prompt_from(0)
    if len(prompt) <= most:
        return prompt
    turns = [number for number, message in enumerate(messages) if message["role"] == "user"]
    low, high = 0, len(turns) - 1
    while low < high:  # Find the first turn from which the chat fits, or the last turn if none does.
        middle = (low + high) // 2
        fits = len(await prompt_from(turns[middle])) <= most
        low, high = (low, middle) if fits else (middle + 1, high)
    return (await prompt_from(turns[low]))[-most:]


def _text_request(
    service: Service, prompt: list[int], max_tokens: int | None, param: str, temperature: float,
    stop: tuple[str, ...] = (),
) -> Request:  # fmt: skip
    """Return the engine's request for one completion."""
    sampling = Sampling(temperature=temperature, seed=secrets.randbits(31)) if temperature else GREEDY
    return Request(
        prompt=prompt,
        max_tokens=resolve_max_tokens(service, len(prompt), max_tokens, param),
        sampling=sampling,
        stop=stop,
        stop_tokens=service.stop_tokens,
    )


async def _generate(state: AppState, requests: Sequence[Request]) -> list[str]:
    return [output.text for output in await run_requests(state, requests)]


def _messages(context: str) -> list[dict[str, str]] | None:
    """Return the messages in a `context` that this server sent: [] for an empty context, None for any other text."""
    if not context:
        return []
    try:
        messages = json.loads(context)
    except (ValueError, RecursionError):
        return None
    is_valid = isinstance(messages, list) and all(
        isinstance(message, dict)
        and message.keys() == {"role", "content"}
        and all(isinstance(value, str) for value in message.values())
        for message in messages
    )
    return messages if is_valid else None


GENERATE = Endpoint(
    path="/generate",
    summary="Texts after prefixes (EasyLM)",
    request=GenerateRequest,
    response=GenerateResponse,
    handler=generate,
)
GREEDY_UNTIL = Endpoint(
    path="/greedy-until",
    summary="Generate greedily after prefixes, until stop strings (EasyLM)",
    request=GreedyUntilRequest,
    response=GreedyUntilResponse,
    handler=greedy_until,
)
CHAT_TURN = Endpoint(
    path="/chat",
    summary="The next turn of a chat (EasyLM)",
    request=ChatTurnRequest,
    response=ChatTurn,
    handler=chat_turn,
)
