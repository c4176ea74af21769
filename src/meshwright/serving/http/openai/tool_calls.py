"""Tool calls in the formats of the chat templates of Qwen, Hermes and Llama 3: parsed, or forced by a grammar."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterable, Sequence
from typing import Any

from meshwright.execution.text.chat import chat_template
from meshwright.execution.text.tokenizer import Tokenizer
from meshwright.serving.engine.request import Constraint
from meshwright.serving.http.openai.messages import FunctionCall, Tool, ToolCall

OPEN, CLOSE = "<tool_call>", "</tool_call>"
"""The tags around a tool call in Qwen's and Hermes' format; the call is a JSON object with `name` and `arguments`."""

JSON_ONLY = '{"name": function name, "parameters":'
"""Text by which Llama 3's chat template is recognised.

In its format, a message that is only a JSON object with `name` and `parameters` is a tool call.
"""

MOST_FORCED_CALLS = 16
"""Maximum calls of a message with tool_choice `required`; a model might else continue to the end of its context."""


def call_constraint(tokenizer: Tokenizer, tools: Sequence[Tool], *, is_parallel: bool) -> Constraint | None:
    """Return a constraint that forces a message to call one or more of these tools.

    None if the chat template has neither of the known formats of calls.

    Args:
        tokenizer: its chat template determines the format of calls. A message in Llama 3's format has only one call.
        tools: the tools, each with the JSON schema of its arguments.
        is_parallel: whether a message may have several calls.
    """
    template = chat_template(tokenizer, has_tools=True) or ""
    if OPEN in template:
        before, after = _tag(tokenizer, OPEN), _tag(tokenizer, CLOSE)
        more = f' ("\\n" call){{0,{MOST_FORCED_CALLS - 1}}}' if is_parallel else ""
        rules, key = [f"start: call{more}", f'call: {before} "\\n" object "\\n" {after}'], "arguments"
    elif JSON_ONLY in template:
        rules, key = ["start: object"], "parameters"
    else:
        return None
    rules.append("object: " + " | ".join(f"tool_{number}" for number in range(len(tools))))
    for number, tool in enumerate(tools):
        head = f'{{"name": {json.dumps(tool.function.name, ensure_ascii=False)}, "{key}": '
        schema = (tool.function.parameters or {}) | {"type": "object"}
        schema.setdefault("x-guidance", {"whitespace_pattern": " "})
        rules.append(f'tool_{number}: {json.dumps(head, ensure_ascii=False)} arguments_{number} "}}"')
        rules.append(f"arguments_{number}: %json {json.dumps(schema)}")
    return Constraint("lark", "\n".join(rules))


def _tag(tokenizer: Tokenizer, tag: str) -> str:
    """Return a tag in Lark syntax: a reference if it is one token, which literal text does not match; else a string."""
    is_token = len(tokenizer.encode(tag, add_special_tokens=False)) == 1
    return tag if is_token else json.dumps(tag)


class ToolParser:
    """Separates the tool calls from the content of one message while it is generated.

    A call must name one of the request's tools and have an object of arguments; all other text is content.

    Args:
        tokenizer: its chat template determines the format of calls; with no known format all text is content.
        names: names of the tools that may be called.
        most: maximum calls of a message; further calls are dropped. None for no limit.
    """

    def __init__(self, tokenizer: Tokenizer | None, names: Iterable[str], most: int | None = None) -> None:
        template = (tokenizer and chat_template(tokenizer, has_tools=True)) or ""
        self._names, self._most = frozenset(names), most
        self._is_tagged = OPEN in template
        self._may_be_json_only = not self._is_tagged and JSON_ONLY in template
        self._buffer = ""
        """Text not returned yet, because it may be part of a call."""
        self.num_calls = 0

    def add(self, text: str, *, is_last: bool) -> tuple[str, list[ToolCall]]:
        """Add new text; return the new content and the new calls. is_last: whether the message ends here."""
        self._buffer += text
        content, calls = self._pop_tagged_calls() if self._is_tagged else ("", [])
        if self._may_be_json_only and self._buffer.strip():
            self._may_be_json_only = self._buffer.lstrip().startswith("{")
            if self._may_be_json_only and is_last and (call := self._parse_call(self._buffer, "parameters")):
                self._buffer, calls = "", [call]
        if self._most is not None:
            calls = calls[: self._most - self.num_calls]
        self.num_calls += len(calls)
        if is_last and self.num_calls:
            self._buffer = self._buffer.rstrip()  # Newlines after the last call, as between calls.
        end = len(self._buffer) if is_last else self._content_end()
        content, self._buffer = content + self._buffer[:end], self._buffer[end:]
        return content, calls

    def _pop_tagged_calls(self) -> tuple[str, list[ToolCall]]:
        """Remove the complete calls, and all text before the last of them, from the buffer; return (content, calls)."""
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
        """Return the length of the buffer's beginning that is content for certain: no call may begin within it.

        White space before a possible call is not counted.
        """
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
        """Return the call in a text; None if the text is not a call. arguments: the JSON key of the arguments."""
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
