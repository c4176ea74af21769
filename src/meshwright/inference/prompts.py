"""Prompts as files have them: the object of a line as a text, tokens or messages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meshwright.data.bad_data import BadRecordError
from meshwright.errors import MeshwrightError
from meshwright.inference.loaded import Prompt


def prompt_of(data: Mapping[str, Any]) -> Prompt:
    """The prompt of an object, `{"prompt": text or tokens}` or `{"messages": […]}`.

    Raises:
        BadRecordError: it has something else.
    """
    if len(data) != 1 or not (found := data.get("prompt") or data.get("messages")):
        names = ", ".join(data) or "nothing"
        raise BadRecordError("missing_field", f"the object has {names}; it has prompt, or messages")
    is_text = "prompt" in data and isinstance(found, str)
    is_tokens = "prompt" in data and isinstance(found, list) and all(type(token) is int for token in found)
    is_chat = "messages" in data and isinstance(found, list) and all(map(_is_message, found))
    if not (is_text or is_tokens or is_chat):
        wanted = "a text or a list of tokens" if "prompt" in data else "a list of objects with role and content"
        raise BadRecordError("missing_field", f"{next(iter(data))} is {str(found)[:40]!r}; it is {wanted}")
    return found


def _is_message(data: Any) -> bool:
    return (
        isinstance(data, dict) and data.keys() == {"role", "content"} and all(isinstance(v, str) for v in data.values())
    )


def as_message(prompt: Prompt) -> Prompt:
    """A text as a user's first message; messages as they are."""
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    if prompt and isinstance(prompt[0], Mapping):
        return prompt
    raise MeshwrightError("--chat takes texts and messages; a prompt of tokens has its template applied already")
