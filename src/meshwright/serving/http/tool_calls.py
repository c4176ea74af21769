"""Calls of tools in the texts that a model makes, in the forms that templates of Qwen, Hermes and Llama 3 ask for."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterable
from typing import Any

from meshwright.serving.http.messages import FunctionCall, ToolCall
from meshwright.text import Tokenizer, chat_template

OPEN, CLOSE = "<tool_call>", "</tool_call>"
"""Around each call of Qwen's and Hermes' models: a JSON object with `name` and `arguments`."""

BARE = '{"name": function name, "parameters":'
"""What templates of Llama 3 say of a call: all of the message is a JSON object with `name` and `parameters`."""


class ToolCallReader:
    """Takes the calls out of one text as it is made.

    A call names one of the tools of the request, with an object of arguments; everything else stays in the text.

    Args:
        tokenizer: whose template says which form calls have. Where it has neither, all is text.
        names: of the tools that may be called.
    """

    def __init__(self, tokenizer: Tokenizer | None, names: Iterable[str]) -> None:
        template = (tokenizer and chat_template(tokenizer, has_tools=True)) or ""
        self._names = frozenset(names)
        self._is_tagged = OPEN in template
        self._may_be_bare = not self._is_tagged and BARE in template
        self._held = ""
        """Text that is not told yet, as it may be part of a call."""
        self.num_calls = 0

    def add(self, text: str, *, is_last: bool) -> tuple[str, list[ToolCall]]:
        """What more of a text adds: to the message's content, and calls. is_last: whether the text ends here."""
        self._held += text
        content, calls = ("", []) if self._may_be_bare else self._tagged_calls() if self._is_tagged else ("", [])
        if self._may_be_bare and self._held.strip():
            self._may_be_bare = self._held.lstrip().startswith("{")
            if self._may_be_bare and is_last and (call := self._call(self._held, "parameters")):
                self._held, calls = "", [call]
        self.num_calls += len(calls)
        if is_last and self.num_calls:
            self._held = self._held.rstrip()  # As between calls, there are ends of lines behind the last.
        kept = len(self._held) if is_last else self._end_of_content()
        content, self._held = content + self._held[:kept], self._held[kept:]
        return content, calls

    def _tagged_calls(self) -> tuple[str, list[ToolCall]]:
        """The whole calls of what is held, and the text before the last of them."""
        content, calls = "", []
        while (start := self._held.find(OPEN)) >= 0 and (end := self._held.find(CLOSE, start)) >= 0:
            call, until = self._call(self._held[start + len(OPEN) : end], "arguments"), end + len(CLOSE)
            if call is None:
                content += self._held[:until]
            else:
                content += self._held[:start].rstrip()
                calls.append(call)
            self._held = self._held[until:]
        return content, calls

    def _end_of_content(self) -> int:
        """Where that which is held may begin a call, with the white space before it."""
        if self._may_be_bare:
            return 0
        if not self._is_tagged:
            return len(self._held)
        start = self._held.find(OPEN)
        if start < 0:
            begun = next((size for size in range(len(OPEN) - 1, 0, -1) if self._held.endswith(OPEN[:size])), 0)
            start = len(self._held) - begun
        return len(self._held[:start].rstrip())

    def _call(self, text: str, arguments: str) -> ToolCall | None:
        """The call that a text is; None where it is none."""
        try:
            found: Any = json.loads(text, parse_constant=_refuse)
            if not isinstance(found, dict) or found.keys() != {"name", arguments} or found["name"] not in self._names:
                return None
            said = json.dumps(found[arguments], ensure_ascii=False)
            said.encode()  # Half of a surrogate pair is in no answer.
        except (ValueError, TypeError, RecursionError):
            return None
        if not isinstance(found[arguments], dict):
            return None
        function = FunctionCall(name=found["name"], arguments=said)
        return ToolCall(id=f"call_{uuid.uuid4().hex}", type="function", function=function)


def _refuse(name: str) -> None:
    raise ValueError(name)
