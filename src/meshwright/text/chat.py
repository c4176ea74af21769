"""The template of a chat, as `tokenizer_config.json` has it: Jinja, run in its sandbox."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from jinja2 import TemplateError
from jinja2.ext import Extension
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from meshwright.errors import MeshwrightError
from meshwright.text.tokenizer import Tokenizer, special_token


def apply_chat_template(
    tokenizer: Tokenizer, messages: Sequence[Mapping[str, str]], *, add_generation_prompt: bool = True
) -> list[int]:
    """The tokens of a chat.

    Args:
        messages: each with `role` (system, user, assistant) and `content`.
        add_generation_prompt: with what begins the assistant's answer.

    Raises:
        MeshwrightError: no template, or one that refuses these messages.
    """
    template = tokenizer.config.get("chat_template")
    if isinstance(template, list):
        template = {entry["name"]: entry["template"] for entry in template}.get("default")
    if not template:
        raise MeshwrightError("this tokenizer has no chat template; give the prompt as the model was trained on it")
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {
        "raise_exception": _refuse,
        "strftime_now": lambda form: f"{datetime.datetime.now():{form}}",
    }
    named = {"bos_token", "eos_token", "unk_token", "pad_token", *tokenizer.config}
    tokens = {name: special_token(tokenizer.config, name) or "" for name in named if name.endswith("_token")}
    try:
        text = environment.from_string(template).render(
            messages=[dict(message) for message in messages],
            # Templates compare them with none, which what is not there does not equal.
            tools=None,
            documents=None,
            add_generation_prompt=add_generation_prompt,
            **tokens,
        )
    except Exception as error:  # A template is a program, and raises what it likes.
        raise MeshwrightError(f"the chat template does not take these messages: {error}") from None
    # The template has written the special tokens that begin a text.
    return tokenizer.encode(text, add_special_tokens=False)


class _Generation(Extension):
    """`{% generation %}` tells a trainer where the assistant's words are; what is in it is written as it is."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **how: Any) -> str:
    """JSON as templates of Hugging Face expect it: Jinja's own filter escapes HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **how)


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)
