"""Prompts in files: the JSON object of each line is parsed as text, tokens or messages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meshwright.errors import MeshwrightError
from meshwright.execution.data.bad_data import BadRecordError
from meshwright.execution.data.encoding import messages_of, tools_of
from meshwright.execution.models.inference.loaded import Chat, Prompt


def prompt_of(data: Mapping[str, Any]) -> Prompt:
    """Return the prompt in an object: `{"prompt": text or tokens}`, or `{"messages": […]}` with or without `tools`.

    Raises:
        BadRecordError: the object has other fields, or a prompt of another type.
    """
    names = [name for name in ("prompt", "messages") if data.get(name)]
    rest = data.keys() - {*names, *(("tools",) if names == ["messages"] else ())}
    if len(names) != 1 or rest:
        raise BadRecordError(
            "missing_field", f"the object has {', '.join(data) or 'nothing'}; it has prompt, or messages and tools"
        )
    if names == ["messages"]:
        messages = messages_of(data, "messages")
        return Chat(messages, tools) if (tools := tools_of(data)) else messages
    found = data["prompt"]
    if not (isinstance(found, str) or (isinstance(found, list) and all(type(token) is int for token in found))):
        raise BadRecordError("missing_field", f"prompt is {str(found)[:40]!r}; it is a text or a list of tokens")
    return found


def as_message(prompt: Prompt) -> Prompt:
    """Return a text as a chat with one user message, and messages unchanged. Raises if the prompt is tokens."""
    if isinstance(prompt, Chat):
        return prompt
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    if prompt and isinstance(prompt[0], Mapping):
        return prompt
    raise MeshwrightError("--chat takes texts and messages; a prompt of tokens has its template applied already")
