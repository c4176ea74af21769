"""Print arguments as a command line: the inverse of `read_words`, for the next commands that screens suggest."""

from __future__ import annotations

import shlex
from collections.abc import Collection
from dataclasses import MISSING, fields, is_dataclass
from typing import Any

from meshwright.cli.words.options import declared_words


def spelled(command: str, args: Any, *, without: Collection[str] = (), **more: Any) -> str:
    """Return a command line with all arguments that are not defaults, quoted for a shell.

    Args:
        command: the command's name, which can differ from that of `args`.
        args: a command's dataclass.
        without: fields to leave out.
        more: values of fields that replace those in `args`.
    """
    values = {name: value for name, value in _changed_fields(args).items() if name not in without} | more
    options, arguments = declared_words(type(args))
    words = ["meshwright", *command.split()]
    for argument in arguments:
        value = values.get(argument.field, ())
        words += map(str, value if isinstance(value, tuple) else (value,))
    for option in {option.field: option for option in options.values()}.values():
        if option.field not in values:
            continue
        value = values[option.field]
        words += [option.name]
        if option.takes != "none":
            words += map(str, value if isinstance(value, tuple) else (value,))
    return shlex.join(words)


def _changed_fields(args: Any) -> dict[str, Any]:
    """Return the values that differ from their defaults, by field, including fields of groups of options."""
    found: dict[str, Any] = {}
    for field in fields(args):
        value = getattr(args, field.name)
        if is_dataclass(value):
            found |= _changed_fields(value)
        elif field.default is MISSING or value != field.default:
            found[field.name] = value
    return found
