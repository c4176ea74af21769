"""OpenAI's `/v1/chat/completions`: the next message of a chat, by the model's own template."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from meshwright.serving.http.call import Call, Piece
from meshwright.serving.http.endpoint import Endpoint, Events, Host
from meshwright.serving.http.errors import ApiError
from meshwright.serving.http.generation import Generation, checked_logprobs, engine_request
from meshwright.serving.http.messages import Message, Tool, ToolCall, chat_prompt
from meshwright.serving.http.texts import TakenToken, chat_logprobs
from meshwright.serving.http.tool_calls import ToolCallReader
from meshwright.serving.http.usage import FinishReason, Usage, UsageCount, finish_reason
from meshwright.serving.request import Output, Request


class ChatFields(Generation):
    """A request for the next message of a chat."""

    messages: Annotated[list[Message], Field(fail_fast=True)] = Field(
        min_length=1, description="a list of messages, each with role and content, one at least"
    )
    max_tokens: int | None = Field(None, ge=0, description="a whole number from 0; with none, what the context leaves")
    max_completion_tokens: int | None = Field(
        None, ge=0, description="a whole number from 0; with none, what the context leaves"
    )
    logprobs: bool = Field(False, description="true or false: whether the logprobs of tokens are in the answer")
    top_logprobs: int | None = Field(
        None, ge=0, description="a whole number from 0, with logprobs of true: of how many tokens in each one's place"
    )
    tools: Annotated[list[Tool], Field(fail_fast=True)] = Field([], description="a list of functions")
    tool_choice: str | dict[str, Any] | None = Field(None, description="none or auto")
    parallel_tool_calls: bool | None = Field(None, description="true or false; without effect")
    modalities: list[Literal["text"]] | None = Field(None, description="['text']: this server makes nothing else")


class Logprobs(BaseModel):
    """The log probabilities of a message's tokens."""

    content: list[TakenToken]
    refusal: None = None


ChatFinishReason = FinishReason | Literal["tool_calls"]


class AssistantMessage(BaseModel):
    """The message that was made. content: None where it is calls of tools alone."""

    role: Literal["assistant"]
    content: str | None
    refusal: None = None
    tool_calls: list[ToolCall] | None = None


class Choice(BaseModel):
    """One of the messages that were made."""

    index: int
    message: AssistantMessage
    logprobs: Logprobs | None
    finish_reason: ChatFinishReason
    token_ids: list[int] | None = None


class Chat(BaseModel):
    """The next message of a chat, `n` times."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[Choice]
    usage: Usage
    prompt_token_ids: list[int] | None = None


class NumberedToolCall(ToolCall):
    """A call of a tool, and which of its message's it is."""

    index: int


class Delta(BaseModel):
    """What is new in a message."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    tool_calls: list[NumberedToolCall] | None = None


class ChunkChoice(BaseModel):
    """What is new in one of the messages."""

    index: int
    delta: Delta
    logprobs: Logprobs | None
    finish_reason: ChatFinishReason | None
    token_ids: list[int] | None = None


class Chunk(BaseModel):
    """What is new in the messages."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: Usage | None = None


async def chat(host: Host, asked: ChatFields) -> Chat | Events:
    """Make the next message of a chat."""
    service = host.service
    service.check_model(asked.model)
    tools = _tools(asked)
    logprobs = checked_logprobs("top_logprobs", asked.top_logprobs)
    if logprobs is not None and not asked.logprobs:
        raise ApiError("top_logprobs is given and logprobs is not true; set logprobs to true", param="top_logprobs")
    prompt = await chat_prompt(service, [message.for_template() for message in asked.messages], tools, "messages")
    if asked.max_tokens is not None and asked.max_completion_tokens not in (None, asked.max_tokens):
        raise ApiError(
            f"max_tokens is {asked.max_tokens} and max_completion_tokens is {asked.max_completion_tokens}; give one",
            param="max_tokens",
        )
    most = asked.max_tokens if asked.max_completion_tokens is None else asked.max_completion_tokens
    request = engine_request(
        asked, service, prompt, param="messages", max_tokens=most, logprobs=(logprobs or 0) if asked.logprobs else None
    )
    making = _Making(host, asked, request)
    return making.events() if asked.stream else await making.whole()


def _tools(asked: ChatFields) -> list[dict[str, Any]]:
    """The tools that the template gets."""
    if asked.tool_choice not in (None, "none", "auto"):
        raise ApiError(
            f"tool_choice is {json.dumps(asked.tool_choice)[:60]}; it is none or auto: this server leaves it to the"
            " model whether it calls a tool",
            param="tool_choice",
        )
    return [] if asked.tool_choice == "none" else [tool.model_dump(exclude_unset=True) for tool in asked.tools]


class _Making:
    """The messages of one request while they are made."""

    def __init__(self, host: Host, asked: ChatFields, request: Request) -> None:
        self._host = host
        self._asked = asked
        self._request = request
        self._usage = UsageCount(host.calls.metrics, [request])
        self._id = f"chatcmpl-{uuid.uuid4().hex}"
        self._created = int(time.time())
        names = [] if asked.tool_choice == "none" else [tool.function.name for tool in asked.tools]
        self._readers = [ToolCallReader(host.service.tokenizer, names) for _ in range(asked.n)] if names else []
        self._begun: set[int] = set()

    async def whole(self) -> Chat:
        """The whole messages."""
        async with self._call() as call:
            pieces = await call.whole()
        for piece in pieces:
            self._usage.add(piece)
        choices = [self._choice(piece.output) for piece in pieces]
        ids: dict[str, Any] = {"prompt_token_ids": list(self._request.prompt)} if self._asked.return_token_ids else {}
        return Chat(
            id=self._id, object="chat.completion", created=self._created, model=self._host.service.model,
            choices=choices, usage=self._usage.finish(), **ids,
        )  # fmt: skip

    async def events(self) -> Events:
        """The messages as they are made."""
        usage = {"usage": None} if self._asked.has_usage else {}
        async with self._call() as call:
            async for pieces in call.pieces():
                yield [self._chunk([choice], **usage) for piece in pieces for choice in self._chunk_choices(piece)]
        total = self._usage.finish()
        if self._asked.has_usage:
            yield [self._chunk([], usage=total)]

    def _call(self) -> Call:
        return Call(self._host.calls, [self._request], self._host.service.limits, is_streamed=self._asked.stream)

    def _choice(self, output: Output) -> Choice:
        content, calls = self._read(output)
        called: dict[str, Any] = {"tool_calls": calls} if calls else {}
        return Choice(
            index=output.text_number,
            message=AssistantMessage(
                role="assistant", content=content or (None if calls else ""), refusal=None, **called
            ),
            logprobs=self._logprobs(output),
            finish_reason=self._finish_reason(output) or "stop",
            **self._ids(output),
        )

    def _chunk_choices(self, piece: Piece) -> list[ChunkChoice]:
        """What a piece adds to its message: the role first of all, and by itself, as OpenAI's clients expect it."""
        self._usage.add(piece)
        output, choices = piece.output, []
        if output.text_number not in self._begun:
            self._begun.add(output.text_number)
            role = Delta(role="assistant", content="")
            choices.append(ChunkChoice(index=output.text_number, delta=role, logprobs=None, finish_reason=None))
        content, calls = self._read(output)
        new: dict[str, Any] = {"content": content} if content else {}
        if calls:
            before = self._readers[output.text_number].num_calls - len(calls)
            new["tool_calls"] = [
                NumberedToolCall(index=before + number, **dict(call)) for number, call in enumerate(calls)
            ]
        choices.append(
            ChunkChoice(
                index=output.text_number,
                delta=Delta(**new),
                logprobs=self._logprobs(output),
                finish_reason=self._finish_reason(output),
                **self._ids(output),
            )
        )
        return choices

    def _chunk(self, choices: Sequence[ChunkChoice], **usage: Usage | None) -> Chunk:
        return Chunk(
            id=self._id, object="chat.completion.chunk", created=self._created, model=self._host.service.model,
            choices=list(choices), **usage,
        )  # fmt: skip

    def _read(self, output: Output) -> tuple[str, list[ToolCall]]:
        """The content and the calls that an output adds to its message."""
        if not self._readers:
            return output.text, []
        return self._readers[output.text_number].add(output.text, is_last=output.done is not None)

    def _finish_reason(self, output: Output) -> ChatFinishReason | None:
        found = finish_reason(output.done)
        has_calls = self._readers and self._readers[output.text_number].num_calls
        return "tool_calls" if has_calls and found == "stop" else found

    def _logprobs(self, output: Output) -> Logprobs | None:
        if not self._asked.logprobs:
            return None
        return Logprobs(content=chat_logprobs(self._host.token_texts, output.logprobs), refusal=None)

    def _ids(self, output: Output) -> dict[str, Any]:
        return {"token_ids": list(output.tokens)} if self._asked.return_token_ids else {}


CHAT = Endpoint(
    path="/v1/chat/completions",
    what="The next message of a chat",
    fields=ChatFields,
    reply=Chat,
    event=Chunk,
    answer=chat,
)
