"""OpenAI's `/v1/responses` without state: nothing is stored, so a client sends the whole conversation each time.

The request is converted to a chat completion request, and the generated message to the output items of the response.
"""

from __future__ import annotations

import itertools
import time
import uuid
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from meshwright.serving.engine.request import Ending, Request
from meshwright.serving.http.endpoint import AppState, Endpoint, EventBatches
from meshwright.serving.http.errors import ApiError
from meshwright.serving.http.openai.chat import ChatCompletionRequest, ChatResponse, chat_request
from meshwright.serving.http.openai.messages import ToolCall
from meshwright.serving.http.request_body import IgnoredFields, RequestModel, validate_request


class InputPart(RequestModel):
    """A part of a message; this server accepts text only."""

    type: Literal["input_text", "output_text", "text"]
    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


Content = str | Annotated[list[InputPart], Field(fail_fast=True)]


class InputItem(RequestModel):
    """A message, a function call of the assistant, the output of a call, or reasoning (not part of the prompt)."""

    type: Literal["message", "function_call", "function_call_output", "reasoning"] = "message"
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: Content | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: Content | None = None
    id: str | None = None
    status: str | None = None
    summary: list[Any] | None = None
    encrypted_content: str | None = None


class FunctionTool(RequestModel):
    """A function that the assistant may call. parameters: a JSON schema."""

    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class FunctionChoice(RequestModel):
    """The value of `tool_choice` that forces the response to call one function."""

    type: Literal["function"]
    name: str


class TextFormat(RequestModel):
    """The format of the generated text: any text, a JSON object, or JSON that matches a schema."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class TextOptions(RequestModel):
    """Options of the generated text. verbosity: without effect."""

    format: TextFormat | None = None
    verbosity: str | None = None


class ReasoningOptions(RequestModel):
    """Options of reasoning. summary: without effect."""

    effort: str | None = None
    summary: str | None = None


class ResponsesRequest(IgnoredFields):
    """The request body of `/v1/responses`."""

    model: str | None = Field(None, description="the model's name, as in /v1/models")
    input: str | Annotated[list[InputItem], Field(fail_fast=True)] = Field(
        description="a text, or a list of messages, function calls and their outputs"
    )
    instructions: str | None = Field(None, description="a text: the system message")
    max_output_tokens: int | None = Field(
        None, ge=1, lt=2**31, description="a whole number from 1; without it, as many as the context allows"
    )
    temperature: float = Field(1.0, ge=0, le=2, description="a number from 0 (greedy) to 2")
    top_p: float = Field(1.0, gt=0, le=1, description="a number above 0 and at most 1")
    stream: bool = Field(False, description="true or false: whether to stream the response as events")
    stream_options: dict[str, Any] | None = Field(None, description="an object; without effect")
    tools: Annotated[list[FunctionTool], Field(fail_fast=True)] = Field([], description="a list of functions")
    tool_choice: str | FunctionChoice | None = Field(
        None, description="none, auto, required, or {type: function, name: …}"
    )
    parallel_tool_calls: bool | None = Field(
        None, description="true or false: whether a response may have several function calls; true without it"
    )
    text: TextOptions | None = Field(None, description="an object with a format")
    reasoning: ReasoningOptions | None = Field(None, description="an object with an effort")
    previous_response_id: str | None = Field(None, description="left out: this server stores no responses")
    background: Literal[False] | None = Field(None, description="false: this server stores no responses")
    truncation: Literal["disabled", "auto"] | None = Field(
        None, description="disabled, or auto: keep only the end of a prompt that does not fit the context"
    )
    include: list[str] | None = Field(None, description="a list of texts; without effect")


class OutputText(BaseModel):
    """The text of a message."""

    type: Literal["output_text"]
    text: str
    annotations: list[Any] = []


class OutputItem(BaseModel):
    """A message or a function call of a response."""

    type: Literal["message", "function_call"]
    id: str
    status: Literal["in_progress", "completed", "incomplete"]
    role: Literal["assistant"] | None = None
    content: list[OutputText] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None


class ResponseObject(BaseModel):
    """The response body of `/v1/responses`."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["in_progress", "completed", "incomplete"]
    error: None
    incomplete_details: dict[str, str] | None
    instructions: str | None
    max_output_tokens: int | None
    model: str
    output: list[OutputItem]
    parallel_tool_calls: bool
    previous_response_id: None
    reasoning: dict[str, str | None]
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, str]
    tools: list[dict[str, Any]]
    top_p: float
    truncation: str
    usage: dict[str, Any] | None
    metadata: dict[str, Any]


class ResponseEvent(BaseModel):
    """An event of a streamed response. Its type determines which of the other fields are set."""

    type: str
    sequence_number: int
    response: ResponseObject | None = None
    output_index: int | None = None
    content_index: int | None = None
    item_id: str | None = None
    item: OutputItem | None = None
    part: OutputText | None = None
    delta: str | None = None
    text: str | None = None
    name: str | None = None
    arguments: str | None = None
    logprobs: list[Any] | None = None


async def create_response(state: AppState, body: ResponsesRequest) -> BaseModel | EventBatches:
    """Generate the response to a conversation.

    Raises:
        ApiError: the request refers to an earlier response, or is invalid.
    """
    if body.previous_response_id is not None:
        raise ApiError(
            "previous_response_id is given, and this server stores no responses; send the whole conversation as input",
            param="previous_response_id",
        )
    chat = _chat_body(body)
    try:
        request = await chat_request(state.service, chat)
    except ApiError as error:
        raise error.renamed(FIELDS) from None
    return await _Response(state, body, chat, request).respond()


FIELDS = {"messages": "input", "reasoning_effort": "reasoning.effort", "max_tokens": "max_output_tokens"}
"""{field name of a chat completion request: field name of `/v1/responses`}, for errors."""


def _chat_body(body: ResponsesRequest) -> ChatCompletionRequest:
    """Return the request as a chat completion request."""
    fields: dict[str, Any] = {
        "messages": _messages(body),
        "max_tokens": body.max_output_tokens,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "stream": body.stream,
        "tools": [{"type": "function", "function": tool.model_dump(exclude={"type"})} for tool in body.tools],
        "parallel_tool_calls": body.parallel_tool_calls,
        "reasoning_effort": body.reasoning.effort if body.reasoning else None,
        "tool_choice": body.tool_choice,
        "truncate_prompt_tokens": -1 if body.truncation == "auto" else None,
    }
    if isinstance(body.tool_choice, FunctionChoice):
        fields["tool_choice"] = {"type": "function", "function": {"name": body.tool_choice.name}}
    if body.text is not None and (form := body.text.format) is not None:
        schema = form.model_dump(by_alias=True, exclude_none=True, exclude={"type"})
        fields["response_format"] = {"type": form.type, **({"json_schema": schema} if schema else {})}
    return validate_request(ChatCompletionRequest, fields)


def _messages(body: ResponsesRequest) -> list[dict[str, Any]]:
    """Return the conversation as messages of a chat."""
    messages: list[dict[str, Any]] = []
    if body.instructions is not None:
        messages.append({"role": "system", "content": body.instructions})
    if isinstance(body.input, str):
        return [*messages, {"role": "user", "content": body.input}]
    for number, item in enumerate(body.input):
        needed = {"message": ("role", "content"), "function_call": ("call_id", "name", "arguments"),
                  "function_call_output": ("call_id", "output"), "reasoning": ()}[item.type]  # fmt: skip
        if missing := [name for name in needed if getattr(item, name) is None]:
            raise ApiError(
                f"input[{number}].{missing[0]} is missing; an item of type {item.type} has {' and '.join(needed)}",
                param=f"input[{number}].{missing[0]}",
            )
        if item.type == "message":
            messages.append({"role": item.role, "content": _text(item.content)})
        elif item.type == "function_call":
            # Add the call to the assistant's message before it, together with its other calls.
            if not (messages and messages[-1]["role"] == "assistant"):
                messages.append({"role": "assistant", "content": ""})
            call = {"name": item.name, "arguments": item.arguments}
            calls = messages[-1].setdefault("tool_calls", [])
            calls.append({"id": item.call_id, "type": "function", "function": call})
        elif item.type == "function_call_output":
            messages.append({"role": "tool", "tool_call_id": item.call_id, "content": _text(item.output)})
    return messages


def _text(content: str | list[InputPart] | None) -> str:
    return content if isinstance(content, str) else "\n".join(part.text for part in content or ())


class _Response(ChatResponse):
    """Builds the response to one request."""

    def __init__(self, state: AppState, body: ResponsesRequest, chat: ChatCompletionRequest, request: Request) -> None:
        super().__init__(state, chat, request)
        self._asked = body
        self._id, self._created = f"resp_{uuid.uuid4().hex}", int(time.time())

    async def _whole(self) -> ResponseObject:
        async with self._stream() as stream:
            (part,) = await stream.collect()
        self._usage.add(part)
        content, calls = self._parse(part.output)
        items = [_message(content, part.output.done)] if content or not calls else []
        return self._object([*items, *map(_call, calls)], part.output.done, is_over=True)

    async def _events(self) -> EventBatches:
        numbers, items, text = itertools.count(), list[OutputItem](), ""
        done: Ending | None = None

        def event(kind: str, **fields: Any) -> ResponseEvent:
            return ResponseEvent(type=f"response.{kind}", sequence_number=next(numbers), **fields)

        def end_message() -> Iterator[ResponseEvent]:
            """Yield the events that end the last item, if it is a message that has not ended."""
            if not items or items[-1].type != "message" or items[-1].status != "in_progress":
                return
            items[-1] = _message(text, done, items[-1].id)
            at = {"output_index": len(items) - 1, "item_id": items[-1].id, "content_index": 0}
            yield event("output_text.done", text=text, logprobs=[], **at)
            yield event("content_part.done", part=_part(text), **at)
            yield event("output_item.done", output_index=len(items) - 1, item=items[-1])

        def begin_message() -> Iterator[ResponseEvent]:
            item = OutputItem(
                type="message", id=f"msg_{uuid.uuid4().hex}", status="in_progress", role="assistant", content=[]
            )
            items.append(item)
            yield event("output_item.added", output_index=len(items) - 1, item=item)
            yield event(
                "content_part.added", output_index=len(items) - 1, item_id=item.id, content_index=0, part=_part("")
            )

        def whole_call(call: ToolCall) -> Iterator[ResponseEvent]:
            item = _call(call)
            items.append(item)
            at, arguments = {"output_index": len(items) - 1, "item_id": item.id}, item.arguments
            begun = item.model_copy(update={"status": "in_progress", "arguments": ""})
            yield event("output_item.added", output_index=len(items) - 1, item=begun)
            yield event("function_call_arguments.delta", delta=arguments, **at)
            yield event("function_call_arguments.done", name=item.name, arguments=arguments, **at)
            yield event("output_item.done", output_index=len(items) - 1, item=item)

        started: list[BaseModel] = [
            event(kind, response=self._object([], None, is_over=False)) for kind in ("created", "in_progress")
        ]
        async with self._stream() as stream:
            async for batch in stream.batches():
                events, started = started, []
                for part in batch:
                    self._usage.add(part)
                    done = part.output.done
                    content, calls = self._parse(part.output)
                    if content:
                        if not items or items[-1].status != "in_progress":
                            text = ""
                            events += begin_message()
                        text += content
                        at = {"output_index": len(items) - 1, "item_id": items[-1].id, "content_index": 0}
                        events.append(event("output_text.delta", delta=content, logprobs=[], **at))
                    for call in calls:
                        events += [*end_message(), *whole_call(call)]
                if done is not None:
                    if not items:
                        events += begin_message()
                    events += end_message()
                yield events
        ended = self._object(items, done, is_over=True)
        yield [event("incomplete" if done == "length" else "completed", response=ended)]

    def _object(self, items: list[OutputItem], done: Ending | None, *, is_over: bool) -> ResponseObject:
        asked, usage = self._asked, self._usage.finish() if is_over else None
        choice = asked.tool_choice
        return ResponseObject(
            id=self._id,
            object="response",
            created_at=self._created,
            status="in_progress" if not is_over else "incomplete" if done == "length" else "completed",
            error=None,
            incomplete_details={"reason": "max_output_tokens"} if done == "length" else None,
            instructions=asked.instructions,
            max_output_tokens=asked.max_output_tokens,
            model=self.state.service.model,
            output=items,
            parallel_tool_calls=asked.parallel_tool_calls is not False,
            previous_response_id=None,
            reasoning={"effort": asked.reasoning.effort if asked.reasoning else None, "summary": None},
            store=False,
            temperature=asked.temperature,
            text={
                "format": asked.text.format.model_dump(by_alias=True, exclude_none=True)
                if asked.text and asked.text.format
                else {"type": "text"}
            },
            tool_choice=choice.model_dump() if isinstance(choice, FunctionChoice) else choice or "auto",
            tools=[tool.model_dump() for tool in asked.tools],
            top_p=asked.top_p,
            truncation=asked.truncation or "disabled",
            usage=usage and {
                "input_tokens": usage.prompt_tokens,
                "input_tokens_details": {
                    "cached_tokens": usage.prompt_tokens_details.cached_tokens, "cache_write_tokens": 0
                },
                "output_tokens": usage.completion_tokens,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": usage.total_tokens,
            },
            metadata=asked.metadata or {},
        )  # fmt: skip


def _message(text: str, done: Ending | None, name: str | None = None) -> OutputItem:
    return OutputItem(
        type="message",
        id=name or f"msg_{uuid.uuid4().hex}",
        status="incomplete" if done == "length" else "completed",
        role="assistant",
        content=[_part(text)],
    )


def _part(text: str) -> OutputText:
    return OutputText(type="output_text", text=text, annotations=[])


def _call(call: ToolCall) -> OutputItem:
    return OutputItem(
        type="function_call", id=f"fc_{uuid.uuid4().hex}", status="completed", call_id=call.id,
        name=call.function.name, arguments=call.function.arguments,
    )  # fmt: skip


RESPONSES = Endpoint(
    path="/v1/responses",
    summary="The response to a conversation, which is not stored",
    request=ResponsesRequest,
    response=ResponseObject,
    chunk=ResponseEvent,
    handler=create_response,
    has_named_events=True,
)
