"""Check the fields of a dataclass against their types: `Literal` choices, whole numbers, numbers and flags.

Data that no type checker has seen (a file, a notebook, the command line) gets one line that names the field.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any, Literal, get_args, get_origin, get_type_hints

from meshwright.errors import MeshwrightError

_PLAIN = {int: "a whole number", float: "a number", bool: "True or False"}
"""The plain types that are checked, in words."""


def check_choices(thing: object) -> None:
    """Raise where a field of a dataclass is not one of its choices, or not of its plain type."""
    for name, (choices, plain) in _fields(type(thing)).items():
        value = getattr(thing, name)
        if choices and value not in choices:
            raise MeshwrightError(not_a_choice(name, value, choices))
        if plain and not _is_of(value, plain):
            wanted = " or ".join(_PLAIN.get(kind, "None") for kind in plain)
            raise MeshwrightError(f"{name} is {value!r}; it is {wanted}")


def not_a_choice(name: str, value: object, choices: Iterable[object]) -> str:
    """The message for a value that is not one of a field's choices, with the nearest one."""
    words = [str(choice) for choice in choices]
    near = difflib.get_close_matches(value, words, n=1) if isinstance(value, str) else []
    hint = f"did you mean {near[0]}? " if near else ""
    return f"{name} is {value!r}; {hint}it is one of {', '.join(words)}"


def _is_of(value: object, kinds: tuple[type, ...]) -> bool:
    """Whether a value has one of the plain types; True is no number, and a whole number is a number."""
    if isinstance(value, bool):
        return bool in kinds
    return isinstance(value, kinds) or (float in kinds and isinstance(value, int))


@cache
def _fields(kind: type) -> Mapping[str, tuple[tuple[Any, ...], tuple[type, ...]]]:
    """The choices and the plain types of each field that has some; None among them where it may be left out."""
    found: dict[str, tuple[tuple[Any, ...], tuple[type, ...]]] = {}
    for name, hint in get_type_hints(kind).items():
        options = (hint,) if get_origin(hint) is Literal or hint in _PLAIN else get_args(hint)
        if any(get_origin(option) is Literal for option in options):
            words = [get_args(option) if get_origin(option) is Literal else (None,) for option in options]
            found[name] = tuple(word for group in words for word in group), ()
        elif options and all(option in _PLAIN or option is type(None) for option in options):
            found[name] = (), tuple(options)
    return found
