"""Fields that take one word of a few, held to those where data that no type checker sees could say anything."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any, Literal, get_args, get_origin, get_type_hints

from meshwright.errors import MeshwrightError


def check_choices(thing: Any) -> None:
    """Raise where a field of a dataclass is none of the words that its `Literal` type lists."""
    for name, choices in _choices(type(thing)).items():
        if (value := getattr(thing, name)) not in choices:
            listed = ", ".join(str(choice) for choice in choices)
            raise MeshwrightError(f"{name} is {value!r}; it is one of {listed}")


@cache
def _choices(kind: type) -> Mapping[str, tuple[Any, ...]]:
    """The words of each field that has some; None among them where it may be left out."""
    found = {}
    for name, hint in get_type_hints(kind).items():
        options = (hint,) if get_origin(hint) is Literal else get_args(hint)
        if any(get_origin(option) is Literal for option in options):
            words = [get_args(option) if get_origin(option) is Literal else (None,) for option in options]
            found[name] = tuple(word for group in words for word in group)
    return found
