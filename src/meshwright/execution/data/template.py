"""Templates of fields: which fields of a record make up a document, and which parts of it have loss.

The syntax is EasyLM's (`fields` of its TextProcessor). Commas separate parts; `+` joins fields of one part, with a
space between them; a part in brackets has no loss: `[question+prompt],answer`. In addition, text in double quotes is
inserted as it is, without the space: `["Q: "+question+"\\nA:"],answer`. The parts `<|bos|>` and `<|eos|>` are the
tokens that begin and end a text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from meshwright.errors import MeshwrightError
from meshwright.execution.data.bad_data import BadRecordError

BOS, EOS = "<|bos|>", "<|eos|>"
"""The parts of a template that stand for the tokens that begin and end a text."""

_OF_SOURCE = re.compile(r'((?:[^"]|"(?:[^"\\]|\\.)*")+)=((?:[^"=]|"(?:[^"\\]|\\.)*")*)', re.DOTALL)
"""Matches `SOURCE=TEMPLATE`, separated by the last = that is not in quotes."""

_WORD = re.compile(r'\s*("(?:[^"\\]|\\.)*"|[][,+]|[^][,+"\s][^][,+"]*)')
"""Matches a text in quotes, one of the characters `[],+`, or the name of a field."""


@dataclass(frozen=True)
class Literal:
    """Text in quotes in a template."""

    text: str


@dataclass(frozen=True)
class Part:
    """A part of a template, whose text is tokenised separately.

    items: names of fields, and literal texts. has_loss: whether the part's tokens have loss.
    """

    items: tuple[str | Literal, ...]
    has_loss: bool

    def text(self, record: Mapping[str, Any]) -> str:
        """Return the text of the part for a record.

        Raises:
            BadRecordError: a field is missing or is not text.
        """
        pieces: list[str] = []
        for number, item in enumerate(self.items):
            if isinstance(item, Literal):
                pieces.append(item.text)
                continue
            if number and not isinstance(self.items[number - 1], Literal):
                pieces.append(" ")
            pieces.append(text_field(record, item))
        return "".join(pieces)


def text_field(record: Mapping[str, Any], name: str) -> str:
    """Return the text of a record's field.

    Raises:
        BadRecordError: the field is missing or is not text.
    """
    value = record.get(name)
    if not isinstance(value, str):
        reason = (
            f"the field {name} is {'null' if value is None else f'{value!r:.40}'}, not text"
            if name in record
            else f"the field {name} is missing; there are {', '.join(map(str, record)) or 'none'}"
        )
        raise BadRecordError("missing_field", reason)
    return value


def parse_fields(text: str) -> tuple[Part, ...]:
    """Return the parts of a template, for example of `[question+prompt],answer`.

    Raises:
        MeshwrightError: the text is not a template; the message has the reason.
    """
    words, at = [], 0
    while at < len(text.rstrip()):
        if (match := _WORD.match(text, at)) is None:
            raise _wrong(text, "a quote is not closed")
        words.append(match[1].strip())
        at = match.end()
    parts: list[Part] = []
    for part in _split(words, ","):
        is_bracketed = part[:1] == ["["]
        if is_bracketed != (part[-1:] == ["]"]) or {"[", "]"} & set(part[1:-1] if is_bracketed else part):
            raise _wrong(text, "brackets stand around a whole part")
        items: list[str | Literal] = []
        for item in _split(part[1:-1] if is_bracketed else part, "+"):
            if len(item) != 1:
                raise _wrong(text, "a field is missing" if not item else f"+ or , is missing before {item[1]}")
            items.append(_item(text, item[0]))
        if len(items) > 1 and {BOS, EOS} & {item for item in items if isinstance(item, str)}:
            raise _wrong(text, f"{BOS} and {EOS} are parts of their own")
        parts.append(Part(tuple(items), not is_bracketed))
    if not any(isinstance(item, str) and item not in (BOS, EOS) for part in parts for item in part.items):
        raise _wrong(text, "it names no field")
    if not any(part.has_loss for part in parts):
        raise _wrong(text, "every part is in brackets, so that no token has loss")
    return tuple(parts)


def parse_templates(texts: Iterable[str]) -> dict[str, str]:
    """Return {path of a source: its template}, given texts like `qa.jsonl=[question],answer`.

    A text without a path is the template of all other sources; its key is "".

    Raises:
        MeshwrightError: a text is not a template, or two are for the same source.
    """
    templates: dict[str, str] = {}
    for text in texts:
        match = _OF_SOURCE.fullmatch(text)
        path, template = match.groups() if match else ("", text)
        parse_fields(template)
        if path in templates:
            hint = "leave one out" if path else f"name the source of one, as qa.jsonl={template}"
            raise MeshwrightError(
                f"--fields has two templates for {path or 'all sources'}: {templates[path]} and {template}; {hint}"
            )
        templates[path] = template
    return templates


def _item(text: str, word: str) -> str | Literal:
    """Return a word of the template `text` as an item: a field name, or a literal if it is in quotes."""
    if not word.startswith('"'):
        return word
    try:
        return Literal(json.loads(word))
    except ValueError:
        raise _wrong(text, f"{word} is not a JSON string") from None


def _split(words: list[str], separator: str) -> list[list[str]]:
    """Return the lists of words between the separators."""
    parts: list[list[str]] = [[]]
    for word in words:
        if word == separator:
            parts.append([])
        else:
            parts[-1].append(word)
    return parts


def _wrong(text: str, reason: str) -> MeshwrightError:
    return MeshwrightError(
        f"--fields is {text!r}: {reason}; it is parts with commas between, fields joined by +, in [] what has no loss:"
        " [question+prompt],answer"
    )
