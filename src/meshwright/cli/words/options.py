"""The options and arguments that a command's dataclass declares, and the values that they accept."""

from __future__ import annotations

import re
import types
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from meshwright.errors import MeshwrightError
from meshwright.options.declare import CommandLine
from meshwright.support.field_types import not_a_choice
from meshwright.units import parse_count, parse_number

SUFFIXES = {"--svg": (".svg", ".html"), "--html": (".html", ".htm")}
"""The file name endings of options that write only one kind of file."""

_WHOLE = re.compile(r"-?[0-9]{1,18}")


@dataclass(frozen=True)
class Option:
    """One option or argument: its field and its values.

    label: what help shows, as `-o, --output FILE`. takes: how many values. choices: the allowed texts, each with its
    value; empty if any text is allowed. type: the type of a value.
    """

    name: str
    label: str
    field: str
    takes: Literal["none", "one", "many"]
    choices: Mapping[str, str | int]
    type: type[int | float | str | Path] = str
    is_needed: bool = False

    def read(self, value: str) -> int | float | str | Path:
        """Parse a value to the field's type; an error if that fails, or the value is not one of the choices."""
        if self.choices:
            if value not in self.choices:
                raise MeshwrightError(not_a_choice(self.name, value, self.choices))
            return self.choices[value]
        suffix = Path(value).suffix.lower()
        if suffix and self.name in SUFFIXES and suffix not in SUFFIXES[self.name]:
            raise MeshwrightError(
                f"{self.name} is {value!r}; it writes {self.name[2:].upper()}, to a name that ends in"
                f" {SUFFIXES[self.name][0]}"
            )
        if self.type is int and not _WHOLE.fullmatch(value):
            try:
                return parse_count(value)
            except MeshwrightError:
                raise MeshwrightError(f"{self.name} is {value!r}; it takes a whole number") from None
        if self.type is float:
            try:
                return parse_number(value)
            except MeshwrightError:
                raise MeshwrightError(f"{self.name} is {value!r}; it takes a number") from None
        return self.type(value)


def declared_options(args: type) -> Mapping[str, Option]:
    """Return the options of a command's dataclass, by each of their names."""
    return declared_words(args)[0]


@cache
def declared_words(args: type) -> tuple[dict[str, Option], tuple[Option, ...]]:
    """Return the options of a dataclass by each of their names, and its arguments in order."""
    options: dict[str, Option] = {}
    arguments: list[Option] = []
    hints = get_type_hints(args, include_extras=True)
    for field in fields(args):
        plain, metadata = _parts(hints[field.name])
        shown = next((item for item in metadata if isinstance(item, CommandLine)), CommandLine())
        is_needed = field.default is MISSING and field.default_factory is MISSING
        if is_dataclass(plain):
            inner, more = declared_words(plain)  # pyright: ignore[reportArgumentType]
            options |= inner
            arguments += more
        elif shown.is_positional:
            arguments.append(_option(shown.metavar, shown.metavar, field.name, plain, is_needed=is_needed))
        else:
            # A field cannot have the name of a keyword: `import_` is --import.
            names = (f"--{field.name.rstrip('_').replace('_', '-')}", *shown.aliases)
            label = f"{', '.join(sorted(names, key=len))} {shown.metavar}".rstrip()
            options |= dict.fromkeys(names, _option(names[0], label, field.name, plain, is_needed=is_needed))
    return options, tuple(arguments)


def _parts(hint: Any) -> tuple[Any, tuple[Any, ...]]:
    """Return a type without its annotations, and the annotations."""
    if get_origin(hint) is not Annotated:
        return hint, ()
    plain, *metadata = get_args(hint)
    inner, more = _parts(plain)
    return inner, (*metadata, *more)


def _option(name: str, label: str, field: str, plain: Any, *, is_needed: bool) -> Option:
    """Return the option or argument for a field of type `plain`: a flag, a number, a choice or text."""
    if plain is bool:
        return Option(name, label, field, "none", {})
    if get_origin(plain) is tuple:
        return Option(name, label, field, "many", {}, int if get_args(plain)[0] is int else str, is_needed)
    kinds = get_args(plain) if get_origin(plain) in (Union, types.UnionType) else (plain,)
    choices = {str(word): word for kind in kinds if get_origin(kind) is Literal for word in get_args(kind)}
    of = next((kind for kind in kinds if kind in (int, float, Path)), str)
    return Option(name, label, field, "one", choices, of, is_needed)
