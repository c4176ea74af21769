"""OpenAI's `/v1/chat/completions`: the next message of a chat, with the model's own chat template."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from meshwright.execution.text.chat import chat_template
from meshwright.serving.engine.request import Constraint, Output, Request
from meshwright.serving.http.async_engine import PromptOutput
from meshwright.serving.http.endpoint import AppState, Endpoint, EventBatches
from meshwright.serving.http.errors import ApiError
from meshwright.serving.http.openai.generation import GenerationRequest, check_logprobs, engine_request
from meshwright.serving.http.openai.logprobs import ChatTokenLogprob, chat_logprobs
from meshwright.serving.http.openai.messages import Message, Tool, ToolCall, chat_prompt
from meshwright.serving.http.openai.responses import FinishReason, ResponseBuilder, Usage, finish_reason
from meshwright.serving.http.openai.tool_calls import ToolParser, call_constraint
from meshwright.serving.http.request_body import RequestModel
from meshwright.serving.http.service import Service


class NamedFunction(RequestModel):
    """The function of a `ToolChoice`."""

    name: str


class ToolChoice(RequestModel):
    """The value of `tool_choice` that forces the message to call one tool."""

    type: Literal["function"]
    function: NamedFunction


class ChatCompletionRequest(GenerationRequest):
    """The request body of a chat completion."""

    messages: Annotated[list[Message], Field(fail_fast=True)] = Field(
        min_length=1, description="a list of at least one message, each with role and content"
    )
    max_tokens: int | None = Field(
        None, ge=0, lt=2**31, description="a whole number from 0; without it, as many as the context allows"
    )
    max_completion_tokens: int | None = Field(
        None, ge=0, lt=2**31, description="a whole number from 0; without it, as many as the context allows"
    )
    logprobs: bool = Field(False, description="true or false: whether to return log probabilities")
    top_logprobs: int | None = Field(
        None,
        ge=0,
        lt=2**31,
        description="a whole number from 0, with logprobs: true; how many alternatives to return at each position",
    )
    tools: Annotated[list[Tool], Field(fail_fast=True)] = Field([], description="a list of functions")
    tool_choice: str | ToolChoice | None = Field(
        None, description="none, auto, required, or {type: function, function: {name: …}}"
    )
    parallel_tool_calls: bool | None = Field(
        None, description="true or false: whether a message may have several tool calls; true without it"
    )
    reasoning_effort: str | None = Field(None, description="a text that the chat template reads, such as low")
    add_generation_prompt: bool | None = Field(
        None, description="true or false: whether the prompt ends with what begins an answer; true without it"
    )
    continue_final_message: bool = Field(
        False, description="true or false: whether to continue the last message instead of answering it"
    )
    chat_template_kwargs: dict[str, Any] = Field(
        {}, description="an object: more variables of the chat template, such as enable_thinking"
    )
    modalities: list[Literal["text"]] | None = Field(None, description="['text']: this server generates nothing else")


class Logprobs(BaseModel):
    """Log probabilities of the tokens of a message."""

    content: list[ChatTokenLogprob]
    refusal: None = None


ChatFinishReason = FinishReason | Literal["tool_calls"]


class AssistantMessage(BaseModel):
    """A generated message. content: None for a message of tool calls only."""

    role: Literal["assistant"]
    content: str | None
    refusal: None = None
    tool_calls: list[ToolCall] | None = None


class Choice(BaseModel):
    """One of the `n` generated messages."""

    index: int
    message: AssistantMessage
    logprobs: Logprobs | None
    finish_reason: ChatFinishReason
    token_ids: list[int] | None = None


class ChatCompletion(BaseModel):
    """The response body of a chat completion."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[Choice]
    usage: Usage
    prompt_token_ids: list[int] | None = None


class ToolCallDelta(ToolCall):
    """A tool call in a stream. index: its index among the message's tool calls."""

    index: int


class Delta(BaseModel):
    """New content of a message, in a stream."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    tool_calls: list[ToolCallDelta] | None = None


class ChunkChoice(BaseModel):
    """New content of one of the `n` messages, in a stream."""

    index: int
    delta: Delta
    logprobs: Logprobs | None
    finish_reason: ChatFinishReason | None
    token_ids: list[int] | None = None


class ChatCompletionChunk(BaseModel):
    """An event of a streamed chat completion."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: Usage | None = None


async def create_chat_completion(state: AppState, body: ChatCompletionRequest) -> BaseModel | EventBatches:
    """Generate the next message of a chat."""
    return await ChatResponse(state, body, await chat_request(state.service, body)).respond()


async def chat_request(service: Service, body: ChatCompletionRequest) -> Request:
    """Return the engine's request for a chat.

    Raises:
        ApiError: a field is invalid, contradicts another one, or is not accepted by the chat template.
    """
    tools = [] if body.tool_choice == "none" else [tool.model_dump(exclude_unset=True) for tool in body.tools]
    forced = _forced_call(service, body)
    num_alternatives = check_logprobs("top_logprobs", body.top_logprobs)
    if num_alternatives is not None and not body.logprobs:
        raise ApiError("top_logprobs is given without logprobs; set logprobs to true", param="top_logprobs")
    is_whole = body.truncate_prompt_tokens is None
    prompt = await chat_prompt(
        service,
        [message.for_template() for message in body.messages],
        "messages",
        tools=tools,
        variables=_template_variables(service, body),
        most=service.context if is_whole else None,
        kept=None if is_whole else service.context,
        **prompt_end(body.add_generation_prompt, body.continue_final_message),
    )
    if body.max_tokens is not None and body.max_completion_tokens not in (None, body.max_tokens):
        raise ApiError(
            f"max_tokens is {body.max_tokens} and max_completion_tokens is {body.max_completion_tokens}; give one",
            param="max_tokens",
        )
    return engine_request(
        body, service, prompt, param="messages",
        max_tokens=body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens,
        logprobs=(num_alternatives or 0) if body.logprobs else None, forced=forced,
    )  # fmt: skip


def prompt_end(add_generation_prompt: bool | None, continue_final_message: bool) -> dict[str, bool]:
    """Return the arguments of `chat_prompt` that determine how the prompt ends, from the vLLM fields of these names.

    Raises:
        ApiError: both are true.
    """
    if continue_final_message and add_generation_prompt:
        raise ApiError(
            "add_generation_prompt and continue_final_message are both true; give one", param="continue_final_message"
        )
    return {
        "add_generation_prompt": not continue_final_message and add_generation_prompt is not False,
        "continue_final_message": continue_final_message,
    }


def _forced_call(service: Service, body: ChatCompletionRequest) -> Constraint | None:
    """Return the constraint that forces a message to call a tool; None if the message need not call one.

    Raises:
        ApiError: `tool_choice` is invalid, or the chat template has no known format for calls.
    """
    choice = body.tool_choice
    if choice in (None, "none", "auto"):
        return None
    if isinstance(choice, str) and choice != "required":
        raise ApiError(
            f"tool_choice is {json.dumps(choice)[:60]}; it must be none, auto, required, or {{type: function,"
            " function: {name: …}}",
            param="tool_choice",
        )
    tools = body.tools
    if isinstance(choice, ToolChoice):
        tools = [tool for tool in body.tools if tool.function.name == choice.function.name]
    if not tools:
        names = ", ".join(tool.function.name for tool in body.tools) or "none"
        named = "required" if isinstance(choice, str) else repr(choice.function.name[:60])
        raise ApiError(
            f"tool_choice is {named}, and the tools are {names[:200]}; name one of them", param="tool_choice"
        )
    is_parallel = body.parallel_tool_calls is not False and isinstance(choice, str)
    found = call_constraint(service.require_tokenizer("a chat"), tools, is_parallel=is_parallel)
    if found is None:
        raise ApiError(
            f"tool_choice forces a tool call, and the chat template of {service.model} has no format for calls that"
            " this server knows; leave it out",
            param="tool_choice",
        )
    return found


def _template_variables(service: Service, body: ChatCompletionRequest) -> dict[str, Any]:
    """Return the additional variables of the chat template, from reasoning_effort and chat_template_kwargs."""
    if body.reasoning_effort is None:
        return body.chat_template_kwargs
    template = chat_template(service.require_tokenizer("a chat"), has_tools=bool(body.tools)) or ""
    if "reasoning_effort" not in template:
        other = "; set chat_template_kwargs.enable_thinking instead" if "enable_thinking" in template else ""
        raise ApiError(
            f"reasoning_effort is given, and the chat template of {service.model} does not read it"
            f"{other or '; leave it out'}",
            param="reasoning_effort",
        )
    return {"reasoning_effort": body.reasoning_effort, **body.chat_template_kwargs}


class ChatResponse(ResponseBuilder[ChatCompletionRequest]):
    """Builds the response to one chat request."""

    def __init__(self, state: AppState, body: ChatCompletionRequest, request: Request) -> None:
        super().__init__(state, body, [request], "chatcmpl")
        names = [] if body.tool_choice == "none" else [tool.function.name for tool in body.tools]
        most = 1 if body.parallel_tool_calls is False else None
        self._tool_parsers = [ToolParser(state.service.tokenizer, names, most) for _ in range(body.n)] if names else []
        self._started: set[int] = set()

    def response(self, parts: Sequence[PromptOutput], **fields: Any) -> ChatCompletion:
        """Return the response with whole messages."""
        if self.body.return_token_ids:
            fields["prompt_token_ids"] = list(self.requests[0].prompt)
        choices = [self._choice(part.output) for part in parts]
        return ChatCompletion(object="chat.completion", choices=choices, **fields)

    def chunks(self, part: PromptOutput, **fields: Any) -> list[BaseModel]:
        """Return the chunks with the new content of a message."""
        choices = self._chunk_choices(part.output)
        return [ChatCompletionChunk(object="chat.completion.chunk", choices=[choice], **fields) for choice in choices]

    def usage_chunk(self, **fields: Any) -> ChatCompletionChunk:
        """Return the last chunk of a stream, which has the usage and no choices."""
        return ChatCompletionChunk(object="chat.completion.chunk", choices=[], **fields)

    def _choice(self, output: Output) -> Choice:
        content, calls = self._parse(output)
        tool_calls: dict[str, Any] = {"tool_calls": calls} if calls else {}
        return Choice(
            index=output.completion,
            message=AssistantMessage(
                role="assistant", content=content or (None if calls else ""), refusal=None, **tool_calls
            ),
            logprobs=self._logprobs(output),
            finish_reason=self._finish_reason(output) or "stop",
            **self.token_ids(output),
        )

    def _chunk_choices(self, output: Output) -> list[ChunkChoice]:
        """Return the new content of a message. As in OpenAI's API, its first chunk has only the role."""
        index, choices = output.completion, []
        if index not in self._started:
            self._started.add(index)
            role = Delta(role="assistant", content="")
            choices.append(ChunkChoice(index=index, delta=role, logprobs=None, finish_reason=None))
        content, calls = self._parse(output)
        delta: dict[str, Any] = {"content": content} if content else {}
        if calls:
            num_before = self._tool_parsers[index].num_calls - len(calls)
            delta["tool_calls"] = [
                ToolCallDelta(index=num_before + number, **dict(call)) for number, call in enumerate(calls)
            ]
        choices.append(
            ChunkChoice(
                index=index,
                delta=Delta(**delta),
                logprobs=self._logprobs(output),
                finish_reason=self._finish_reason(output),
                **self.token_ids(output),
            )
        )
        return choices

    def _parse(self, output: Output) -> tuple[str, list[ToolCall]]:
        """Return the content and the tool calls that an output adds to its message."""
        if not self._tool_parsers:
            return output.text, []
        return self._tool_parsers[output.completion].add(output.text, is_last=output.done is not None)

    def _finish_reason(self, output: Output) -> ChatFinishReason | None:
        reason = finish_reason(output.done)
        has_calls = self._tool_parsers and self._tool_parsers[output.completion].num_calls
        # As in OpenAI's API, a message that is forced to call one named tool ends with "stop".
        is_named = isinstance(self.body.tool_choice, ToolChoice)
        return "tool_calls" if has_calls and reason == "stop" and not is_named else reason

    def _logprobs(self, output: Output) -> Logprobs | None:
        if not self.body.logprobs:
            return None
        return Logprobs(content=chat_logprobs(self.state.token_decoder, output.logprobs), refusal=None)


CHAT_COMPLETIONS = Endpoint(
    path="/v1/chat/completions",
    summary="The next message of a chat",
    request=ChatCompletionRequest,
    response=ChatCompletion,
    chunk=ChatCompletionChunk,
    handler=create_chat_completion,
)
