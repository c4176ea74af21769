"""The messages and tools of a chat, and the tokens that the model's template makes of them."""

from __future__ import annotations

import asyncio
import json
from typing import Annotated, Any, Literal

from pydantic import Field

from meshwright.errors import MeshwrightError
from meshwright.serving.http.errors import ApiError
from meshwright.serving.http.fields import Fields
from meshwright.serving.http.service import LONG_TEXT, Service
from meshwright.text import apply_chat_template


class ContentPart(Fields):
    """A part of a message: text, as this server reads nothing else."""

    type: Literal["text"]
    text: str


class FunctionCall(Fields):
    """A function and what it is called with. arguments: JSON as text."""

    name: str
    arguments: str


class ToolCall(Fields):
    """A call of a tool that the assistant made before."""

    id: str
    type: Literal["function"]
    function: FunctionCall


class Message(Fields):
    """A message of a chat. content: text, or parts of it; None of an assistant that only called tools."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[ContentPart], Field(fail_fast=True)] | None = None
    name: str | None = None
    refusal: str | None = None
    tool_calls: Annotated[list[ToolCall], Field(fail_fast=True)] | None = None
    tool_call_id: str | None = None

    def for_template(self) -> dict[str, Any]:
        """The message as templates of Hugging Face read it."""
        content = self.content
        if isinstance(content, list):
            content = "\n".join(part.text for part in content)
        # "developer" is OpenAI's newer word for the same. Templates add text to a content, which None is not.
        found: dict[str, Any] = {"role": "system" if self.role == "developer" else self.role, "content": content or ""}
        if self.name is not None:
            found["name"] = self.name
        if self.tool_call_id is not None:
            found["tool_call_id"] = self.tool_call_id
        if self.tool_calls:
            found["tool_calls"] = [
                {"id": call.id, "type": call.type, "function": {"name": call.function.name, "arguments": _object(call)}}
                for call in self.tool_calls
            ]
        return found


class Function(Fields):
    """A function that the assistant may call. parameters: their JSON schema."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Fields):
    """A tool that the assistant may call."""

    type: Literal["function"]
    function: Function


async def chat_prompt(
    service: Service, messages: list[dict[str, Any]], tools: list[dict[str, Any]], param: str
) -> list[int]:
    """The tokens of a chat, with what begins the assistant's answer. param: the field that the messages came in.

    Raises:
        ApiError: no template, or one that does not take these messages.
    """
    tokenizer = service.needs_tokenizer("writes chats")
    try:
        if sum(len(message["content"]) for message in messages) <= LONG_TEXT:
            return apply_chat_template(tokenizer, messages, tools=tools)
        return await asyncio.to_thread(apply_chat_template, tokenizer, messages, tools=tools)
    except MeshwrightError as error:
        raise ApiError(str(error), param=param) from None


def _object(call: ToolCall) -> Any:
    """The arguments of a call as an object, which templates write in their own way; as text if they are none."""
    try:
        return json.loads(call.function.arguments)
    except (ValueError, RecursionError):
        return call.function.arguments
