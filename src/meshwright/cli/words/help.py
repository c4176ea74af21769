"""Print the help of a command from its dataclass: arguments, then options in the order and groups of their fields."""

from __future__ import annotations

import ast
import inspect
import itertools
import textwrap
from collections.abc import Sequence
from dataclasses import fields, is_dataclass

from meshwright.cli.words.options import declared_words
from meshwright.pictures.text import wrap

_COLUMN = 26
"""The column in which help texts begin; the text of an option that is too long for it begins on the next line."""


def help_text(args: type, command: str, examples: Sequence[str]) -> str:
    """Return the help of a command.

    Args:
        args: the command's dataclass; its docstring is the description of the command.
        command: the command's name.
        examples: whole command lines.
    """
    arguments = [word.name if word.is_needed else f"[{word.name}]" for word in declared_words(args)[1]]
    usage = " ".join(["usage: meshwright", command, "[OPTIONS]", *arguments])
    lines = wrap(usage, then=" " * 7)
    for paragraph in inspect.cleandoc(args.__doc__ or "").split("\n\n"):
        lines += ["", *wrap(paragraph)]
    for title, rows in help_sections(args).items():
        lines += ["", *wrap(title), *(line for row in rows for line in _row(*row))]
    return "\n".join([*lines, "", "examples", *(f"  {example}" for example in examples)])


def help_sections(args: type) -> dict[str, list[tuple[str, str]]]:
    """Return {title of a group: the (label, help text) of each of its arguments and options}."""
    sections: dict[str, list[tuple[str, str]]] = {"arguments": [], "options": []}
    _add_fields(args, "options", sections)
    return {title: rows for title, rows in sections.items() if rows}


def field_docs(args: type) -> dict[str, str]:
    """Return {field of a dataclass: the docstring below it, in one line}, read from the source."""
    found: dict[str, str] = {}
    for base in reversed([base for base in args.__mro__ if is_dataclass(base)]):
        (declared,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        for pair in itertools.pairwise(declared.body):  # pyright: ignore[reportAttributeAccessIssue]
            match pair:
                case ast.AnnAssign(target=ast.Name(name)), ast.Expr(ast.Constant(str(text))):
                    found[name] = " ".join(text.split())
    return found


def _add_fields(args: type, title: str, sections: dict[str, list[tuple[str, str]]]) -> None:
    """Add each field of a dataclass to its section; a group of options is a section titled by its docstring."""
    options, arguments = declared_words(args)
    words = {word.field: word for word in (*options.values(), *arguments)}
    docs = field_docs(args)
    for field in fields(args):
        if is_dataclass(group := field.default_factory):
            doc = inspect.getdoc(group) or field.name
            sections[doc] = []
            _add_fields(group, doc, sections)  # pyright: ignore[reportArgumentType]
        else:
            word = words[field.name]
            sections["arguments" if word in arguments else title].append((word.label, docs[field.name]))


def _row(label: str, text: str) -> list[str]:
    """Return the lines of an option: its label, and its help text in the next column or below."""
    beside = len(label) + 4 <= _COLUMN
    first = f"  {label}".ljust(_COLUMN) if beside else " " * _COLUMN
    return [*([] if beside else [f"  {label}"]), *wrap(text, first=first, then=" " * _COLUMN)]
