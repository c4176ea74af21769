"""Apply chat templates: Jinja programs from `tokenizer_config.json`, run in Jinja's sandbox."""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from meshwright.errors import MeshwrightError
from meshwright.execution.text.tokenizer import Tokenizer, special_token

if TYPE_CHECKING:
    from jinja2 import Template
    from jinja2.ext import Extension
    from jinja2.nodes import Node
    from jinja2.parser import Parser


def apply_chat_template(
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] = (),
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    variables: Mapping[str, Any] | None = None,
    cut: Callable[[str], str] = lambda text: text,
) -> list[int]:
    """Return the tokens of a chat.

    Args:
        messages: each with `role` (system, user, assistant) and `content`, and any other keys that the template reads.
        tools: tools that the assistant may call, in OpenAI's format: each with `type` and `function`.
        add_generation_prompt: append the text that begins the assistant's answer.
        continue_final_message: end with the text of the last message, which the model then continues.
        variables: values of the template's own variables, for example Qwen3's `enable_thinking`.
        cut: called with the text of the chat; returns the part of it to tokenise, or raises.

    Raises:
        MeshwrightError: there is no template, or it rejects these messages.
    """
    text = _render(tokenizer, messages, tools=tools, add_generation_prompt=add_generation_prompt, variables=variables)
    text = _GENERATED.sub(r"\1", text)
    if continue_final_message:
        content = str(messages[-1].get("content") or "")
        at = text.rfind(content.strip())
        if at < 0 or not content.strip():
            raise MeshwrightError("the text of the last message is not in the chat as the template writes it")
        # Templates may strip a message; if this one does not, the message's own white space at the end is kept.
        whole = content.lstrip()
        text = text[: at + len(whole if text.startswith(whole, at) else content.strip())]
    # The template itself writes the special tokens that begin a text.
    return tokenizer.encode(cut(text), add_special_tokens=False)


class ChatExample(NamedTuple):
    """The tokens of a chat, and for each token whether it has loss."""

    tokens: list[int]
    loss: list[bool]


def chat_examples(
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] = (),
    first: int = 0,
) -> list[ChatExample]:
    """Return training examples of a chat: its tokens, with loss on the assistant's turns and their end tokens.

    A turn is one message of the assistant. If the template marks the assistant's text (`{% generation %}`), the marked
    text has loss. Without marks, a turn's text is what rendering the chat up to its end adds to the chat before the
    turn, rendered with the generation prompt. So the generation prompt has no loss.

    A template may render a turn differently when later messages follow: Qwen3's drops its thoughts. Then the chat
    becomes several examples. Each turn has loss in one of them, in which the text before the turn is what the model
    reads when it generates that turn.

    Args:
        messages: each with `role` (system, user, assistant) and `content`, and other keys that the template reads. A
          turn with a `weight` of 0 has no loss, as in OpenAI's fine-tuning files.
        tools: tools that the assistant can call.
        first: index of the first message whose tokens can have loss.

    Raises:
        MeshwrightError: there is no template, it rejects these messages, or its turns do not begin with its generation
          prompt, so that their tokens cannot be found.
    """
    whole = _render(tokenizer, messages, tools=tools, add_generation_prompt=False)
    learned = [
        number
        for number, message in enumerate(messages)
        if message.get("role") == "assistant" and number >= first and message.get("weight") != 0
    ]
    if any(mark in str(message.get("content")) for message in messages for mark in _MARKS):
        raise MeshwrightError("a message has the characters U+FDD0 or U+FDD1, which are none")
    if _MARKS[0] in whole:
        spans, text = list[Span](), ""
        for number, piece in enumerate(re.split("|".join(_MARKS), whole)):
            if number % 2:
                spans.append((len(text), len(text) + len(piece)))
            text += piece
        turns = [number for number, message in enumerate(messages) if message.get("role") == "assistant"]
        if len(spans) != len(turns):
            raise MeshwrightError(f"the chat template marks {len(spans)} turns of the assistant, of {len(turns)}")
        texts = [(text, [span for span, number in zip(spans, turns, strict=True) if number in learned])]
    else:
        texts = _texts_with_spans(whole, [_turn(tokenizer, messages, number, tools) for number in learned])
    return [_with_loss(tokenizer, text, spans) for text, spans in texts]


Span = tuple[int, int]
"""(start, stop) of characters in a text."""


def _with_loss(tokenizer: Tokenizer, text: str, spans: Sequence[Span]) -> ChatExample:
    """Return the tokens of a text, with loss on tokens that begin in one of the spans, which are in order."""
    tokens, places = tokenizer.encode_with_places(text)
    has_loss, number = [], 0
    for start, _ in places:  # Tokens and spans are both in the order of the text.
        while number < len(spans) and start >= spans[number][1]:
            number += 1
        has_loss.append(number < len(spans) and start >= spans[number][0])
    return ChatExample(tokens, has_loss)


class _Turn(NamedTuple):
    """A turn of the assistant: the text of the chat up to its end, and the index in it where the turn begins."""

    start: int
    text: str


def _turn(
    tokenizer: Tokenizer, messages: Sequence[Mapping[str, Any]], number: int, tools: Sequence[Mapping[str, Any]]
) -> _Turn:
    """Return the turn that is message `number`, by rendering the chat up to it and before it. Raises if not found."""
    before = _render(tokenizer, messages[:number], tools=tools, add_generation_prompt=True)
    until = _render(tokenizer, messages[: number + 1], tools=tools, add_generation_prompt=False)
    if not until.startswith(before):
        raise MeshwrightError(
            f"the chat template begins turn {number + 1} of a chat otherwise than its generation prompt, so that its"
            " tokens cannot be found; put {% generation %} and {% endgeneration %} around the assistant's words in the"
            " template"
        )
    return _Turn(len(before), until)


def _texts_with_spans(whole: str, turns: list[_Turn]) -> list[tuple[str, list[Span]]]:
    """Return the texts of the examples of a chat, each with the spans of the turns that have loss in it.

    A turn has loss in one text, which begins with `turn.text`. whole: the text of the whole chat, which is one of the
    texts if it begins with the text of a turn, or if there are no turns.
    """
    texts: list[tuple[str, list[Span]]] = []
    text, left = whole, turns
    while left:
        if spans := [(turn.start, len(turn.text)) for turn in left if text.startswith(turn.text)]:
            texts.append((text, spans))
        left = [turn for turn in left if not text.startswith(turn.text)]
        text = left[-1].text if left else ""
    return texts[::-1] or [(whole, [])]


def _render(
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] = (),
    add_generation_prompt: bool,
    variables: Mapping[str, Any] | None = None,
) -> str:
    """Return the text of a chat, with `_MARKS` around the text that the template marks as the assistant's."""
    template = chat_template(tokenizer, has_tools=bool(tools))
    if not template:
        raise MeshwrightError("this tokenizer has no chat template; give the prompt as the model was trained on it")
    named = {"bos_token", "eos_token", "unk_token", "pad_token", *tokenizer.config}
    tokens = {name: special_token(tokenizer.config, name) or "" for name in named if name.endswith("_token")}
    try:
        return _compiled(template).render(
            dict(variables or {}),
            messages=[dict(message) for message in messages],
            # Templates compare tools with none, which an undefined variable does not equal.
            tools=[dict(tool) for tool in tools] or None,
            documents=None,
            add_generation_prompt=add_generation_prompt,
            **tokens,
        )
    except Exception as error:  # A template is a program, and may raise anything.
        raise MeshwrightError(f"the chat template does not take these messages: {error}") from None


def chat_template(tokenizer: Tokenizer, *, has_tools: bool = False) -> str | None:
    """Return the chat template of a tokenizer; None if it has none.

    has_tools: return the tokenizer's template for chats with tools, if it has a separate one.
    """
    template = tokenizer.config.get("chat_template")
    if isinstance(template, list):
        named = {entry["name"]: entry["template"] for entry in template}
        template = (named.get("tool_use") if has_tools else None) or named.get("default")
    return template or None


@cache
def _compiled(template: str) -> Template:
    """Return a compiled template; cached, because many chats share one template."""
    from jinja2.sandbox import ImmutableSandboxedEnvironment  # Of [train] and [serve], as all of Jinja.

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _generation_tag()]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {
        "raise_exception": _refuse,
        "strftime_now": lambda form: f"{datetime.datetime.now():{form}}",
    }
    return environment.from_string(template)


_MARKS = "\ufdd0", "\ufdd1"
"""Temporary marks around the assistant's text: noncharacter code points, which no text contains."""

_GENERATED = re.compile(f"{_MARKS[0]}(.*?){_MARKS[1]}", re.DOTALL)


@cache
def _generation_tag() -> type[Extension]:
    """Return the Jinja extension for `{% generation %}`, which puts the enclosed text between `_MARKS`."""
    from jinja2.ext import Extension
    from jinja2.nodes import CallBlock

    class Generation(Extension):
        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Parser) -> Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

        def _mark(self, caller: Callable[[], str]) -> str:
            return f"{_MARKS[0]}{caller()}{_MARKS[1]}"

    return Generation


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **how: Any) -> str:
    """Return JSON as Hugging Face's templates expect it, unlike Jinja's own filter, which escapes HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **how)


def _refuse(message: str) -> NoReturn:
    from jinja2 import TemplateError

    raise TemplateError(message)
