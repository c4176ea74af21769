"""The messages and tools of a chat request, and the prompt that the model's chat template builds from them."""

from __future__ import annotations

import json
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import Field

from meshwright.errors import MeshwrightError
from meshwright.execution.text.chat import apply_chat_template
from meshwright.serving.http.errors import ApiError
from meshwright.serving.http.request_body import RequestModel
from meshwright.serving.http.service import Service


class ContentPart(RequestModel):
    """A part of a message's content; this server accepts text only."""

    type: Literal["text"]
    text: str


class FunctionCall(RequestModel):
    """A function name and its arguments. arguments: JSON as text."""

    name: str
    arguments: str


class ToolCall(RequestModel):
    """A tool call of the assistant."""

    id: str
    type: Literal["function"]
    function: FunctionCall


class Message(RequestModel):
    """A message of a chat. content: text or its parts; None for an assistant message of tool calls only."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[ContentPart], Field(fail_fast=True)] | None = None
    name: str | None = None
    refusal: str | None = None
    tool_calls: Annotated[list[ToolCall], Field(fail_fast=True)] | None = None
    tool_call_id: str | None = None

    def for_template(self) -> dict[str, Any]:
        """Return the message in the format of Hugging Face's chat templates."""
        content = self.content
        if isinstance(content, list):
            content = "\n".join(part.text for part in content)
        # "developer" is OpenAI's newer name for "system". Templates concatenate content with text, so it is never None.
        role = "system" if self.role == "developer" else self.role
        message: dict[str, Any] = {"role": role, "content": content or ""}
        if self.name is not None:
            message["name"] = self.name
        if self.tool_call_id is not None:
            message["tool_call_id"] = self.tool_call_id
        if self.tool_calls:
            message["tool_calls"] = [
                {
                    "id": call.id,
                    "type": call.type,
                    "function": {"name": call.function.name, "arguments": _arguments(call)},
                }
                for call in self.tool_calls
            ]
        return message


class Function(RequestModel):
    """A function that the assistant may call. parameters: a JSON schema."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(RequestModel):
    """A tool that the assistant may call."""

    type: Literal["function"]
    function: Function


async def chat_prompt(
    service: Service,
    messages: list[dict[str, Any]],
    param: str,
    *,
    tools: list[dict[str, Any]] | None = None,
    variables: dict[str, Any] | None = None,
    most: int | None,
    kept: int | None = None,
    **ends: bool,
) -> list[int]:
    """Return the tokens of a chat's prompt, built by the model's chat template.

    Args:
        service: the server, for its tokenizer.
        messages: the messages, from `Message.for_template`.
        param: the field of the messages, for errors.
        tools: the tools, in the template's format.
        variables: additional variables of the template.
        most: maximum number of tokens. A text that is certainly longer, by its characters, is refused before it is
            tokenized; the caller checks the tokens returned. None for no limit.
        kept: number of tokens at the end that the caller uses; earlier ones may be left out. None for all.
        ends: `add_generation_prompt` and `continue_final_message` of `apply_chat_template`.

    Raises:
        ApiError: there is no chat template, or it rejects these messages.
    """
    tokenizer = service.require_tokenizer("a chat")
    options: dict[str, Any] = {"tools": tools or (), "variables": variables, **ends}

    def cut(text: str) -> str:
        end = service.end(text, kept)
        service.check_num_characters(param, end, most)
        return end

    try:
        return await service.run(partial(apply_chat_template, tokenizer, messages, cut=cut, **options))
    except MeshwrightError as error:
        raise ApiError(str(error), param=param) from None


def _arguments(call: ToolCall) -> Any:
    """Return the arguments of a call as data, which chat templates format themselves; as text if they are not JSON."""
    try:
        return json.loads(call.function.arguments)
    except (ValueError, RecursionError):
        return call.function.arguments
