"""Parse tool calls in a model's output, in the formats of Qwen's and Hermes' chat templates and of Llama 3's."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterable
from typing import Any

from meshwright.serving.http.openai.messages import FunctionCall, ToolCall
from meshwright.text import Tokenizer, chat_template

OPEN, CLOSE = "<tool_call>", "</tool_call>"
"""The tags of Qwen and Hermes around a call, which is a JSON object with `name` and `arguments`."""

JSON_ONLY = '{"name": function name, "parameters":'
"""From Llama 3's chat template: a call is a message that is only a JSON object with `name` and `parameters`."""


class ToolParser:
    """Separates the tool calls from the content of one message while it is generated.

    A call must name one of the request's tools and have an object of arguments; everything else stays content.

    Args:
        tokenizer: its chat template decides the format of calls; with neither format everything is content.
        names: the names of the tools that may be called.
    """

    def __init__(self, tokenizer: Tokenizer | None, names: Iterable[str]) -> None:
        template = (tokenizer and chat_template(tokenizer, has_tools=True)) or ""
        self._names = frozenset(names)
        self._is_tagged = OPEN in template
        self._may_be_json_only = not self._is_tagged and JSON_ONLY in template
        self._buffer = ""
        """Text that was not returned yet, because it may be part of a call."""
        self.num_calls = 0

    def add(self, text: str, *, is_last: bool) -> tuple[str, list[ToolCall]]:
        """Add new text; return the new content and the new calls. is_last: whether the message ends here."""
        self._buffer += text
        content, calls = self._pop_tagged_calls() if self._is_tagged else ("", [])
        if self._may_be_json_only and self._buffer.strip():
            self._may_be_json_only = self._buffer.lstrip().startswith("{")
            if self._may_be_json_only and is_last and (call := self._parse_call(self._buffer, "parameters")):
                self._buffer, calls = "", [call]
        self.num_calls += len(calls)
        if is_last and self.num_calls:
            self._buffer = self._buffer.rstrip()  # Newlines after the last call, as between calls.
        end = len(self._buffer) if is_last else self._content_end()
        content, self._buffer = content + self._buffer[:end], self._buffer[end:]
        return content, calls

    def _pop_tagged_calls(self) -> tuple[str, list[ToolCall]]:
        """Remove the complete calls and the content before the last of them from the buffer."""
        content, calls = "", []
        while (start := self._buffer.find(OPEN)) >= 0 and (end := self._buffer.find(CLOSE, start)) >= 0:
            call, until = self._parse_call(self._buffer[start + len(OPEN) : end], "arguments"), end + len(CLOSE)
            if call is None:
                content += self._buffer[:until]
            else:
                content += self._buffer[:start].rstrip()
                calls.append(call)
            self._buffer = self._buffer[until:]
        return content, calls

    def _content_end(self) -> int:
        """Where a call may begin in the buffer, including the white space before it."""
        if self._may_be_json_only:
            return 0
        if not self._is_tagged:
            return len(self._buffer)
        start = self._buffer.find(OPEN)
        if start < 0:
            partial = next((size for size in range(len(OPEN) - 1, 0, -1) if self._buffer.endswith(OPEN[:size])), 0)
            start = len(self._buffer) - partial
        return len(self._buffer[:start].rstrip())

    def _parse_call(self, text: str, arguments: str) -> ToolCall | None:
        """Parse a call. arguments: the key of its arguments. None if the text is not a call."""
        try:
            call: Any = json.loads(text, parse_constant=_reject_constant)
            if not isinstance(call, dict) or call.keys() != {"name", arguments} or call["name"] not in self._names:
                return None
            arguments_json = json.dumps(call[arguments], ensure_ascii=False)
            arguments_json.encode()  # Raises for an unpaired surrogate, which no response can hold.
        except (ValueError, TypeError, RecursionError):
            return None
        if not isinstance(call[arguments], dict):
            return None
        function = FunctionCall(name=call["name"], arguments=arguments_json)
        return ToolCall(id=f"call_{uuid.uuid4().hex}", type="function", function=function)


def _reject_constant(name: str) -> None:
    raise ValueError(name)
