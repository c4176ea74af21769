"""The words of a command line checked before they are parsed, so that every mistake is one line.

An option may be unknown, have a new name, belong to another kind of plan, lack its value, or have a wrong one.
"""

from __future__ import annotations

import difflib
import re
import types
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import cache
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from tyro.conf import Positional

from meshwright.errors import MeshwrightError
from meshwright.step.choices import not_a_choice

ALIASES = {"--mesh-dim": "--mesh", "--out": "--output"}
"""Second names of options, which help does not list."""

NEW_NAMES = {
    "--sequence": "--sp-method gather|ring|ulysses",
    "--sequence-parallel": "--tp-stream split|whole",
    "--no-sequence-parallel": "--tp-stream whole",
    "--overlaps-tp": "--collective-matmul",
    "--no-overlaps-tp": "no --collective-matmul",
    "--for": "--serve decode|prefill",
    "--compute-dtype": "--dtype",
}
"""Options of before, and what says it today."""

_OPTION = re.compile(r"(-[A-Za-z]|--[A-Za-z][\w-]*)(=.*)?", re.DOTALL)
_POSITIONAL = get_args(Positional[str])[1]


@dataclass(frozen=True)
class Option:
    """One option: how many values it takes, and which."""

    name: str
    takes: Literal["none", "one", "many"]
    choices: tuple[str, ...] = ()
    type: type | None = None

    def check(self, value: str) -> None:
        """Raise where a value is not of the option's type, or not one of its choices."""
        if self.choices and value not in self.choices:
            raise MeshwrightError(not_a_choice(self.name, value, self.choices))
        if self.type in (int, float):
            try:
                self.type(value)
            except ValueError:
                wanted = "a whole number" if self.type is int else "a number"
                raise MeshwrightError(f"{self.name} is {value!r}; it takes {wanted}") from None


def canonical(words: Sequence[str]) -> list[str]:
    """The words with every option by its first name."""
    found = []
    for word in words:
        name, equals, value = word.partition("=")
        found.append(ALIASES.get(name, name) + equals + value if name in ALIASES else word)
    return found


def check_words(words: Sequence[str], args: type, *, kinds: Mapping[str, type], hints: Mapping[str, str]) -> None:
    """Raise where the words are not options and arguments of a command.

    Args:
        words: of the command line, after the command.
        args: the dataclass of the arguments.
        kinds: the dataclasses of a command's other kinds, each under the words that ask for it.
        hints: what to use instead of an option of another kind, by its name.
    """
    known, needed = _declared(args)
    if {"-h", "--help"} & set(words):
        return
    rest = list(words)
    arguments = 0
    while rest:
        word = rest.pop(0)
        if not (match := _OPTION.fullmatch(word)):
            arguments += 1
            continue
        name, joined = match[1].replace("_", "-"), match[2]
        if name not in known:
            raise MeshwrightError(_unknown(name, args, kinds, hints))
        option = known[name]
        if option.takes == "none":
            if joined:
                raise MeshwrightError(f"{name} takes no value; leave {joined} out")
            continue
        values = [joined[1:]] if joined else []
        while rest and not _OPTION.fullmatch(rest[0]) and (option.takes == "many" or not values):
            values.append(rest.pop(0))
        if not values:
            raise MeshwrightError(f"{name} needs a value")
        for value in values:
            option.check(value)
    if arguments < len(needed):
        raise MeshwrightError(f"{needed[arguments]} is missing; --help says what it is")
    missing = [option for option in _required(args) if not any(word.split("=")[0] == option for word in words)]
    if missing:
        raise MeshwrightError(f"{missing[0]} is missing; --help says what it takes")


def _unknown(name: str, args: type, kinds: Mapping[str, type], hints: Mapping[str, str]) -> str:
    """The message for an option that a command does not have."""
    known = _declared(args)[0]
    new = NEW_NAMES.get(name, "")
    if new and any(new.split()[0] in _declared(kind)[0] for kind in (args, *kinds.values())):
        return f"{name} is now {new}"
    this = next((kind for kind, declared in kinds.items() if declared is args), "")
    for other, declared in kinds.items():
        if name in _declared(declared)[0]:
            hint = f"use {hints[name]}" if name in hints else "leave it out"
            return f"{name} is an option of {other}, and this is {this}; {hint}"
    near = difflib.get_close_matches(name, known, n=1)
    return f"there is no option {name}; {f'did you mean {near[0]}? ' if near else ''}--help lists them"


@cache
def _declared(args: type) -> tuple[dict[str, Option], tuple[str, ...]]:
    """The options of a dataclass by each of their names, and the metavars of the arguments that it needs."""
    options: dict[str, Option] = {}
    needed: list[str] = []
    hints = get_type_hints(args, include_extras=True)
    for field in fields(args):
        plain, metadata = _parts(hints[field.name])
        shown = next((item for item in metadata if hasattr(item, "metavar")), None)
        if is_dataclass(plain):
            inner, arguments = _declared(plain)  # pyright: ignore[reportArgumentType]
            options |= inner
            needed += arguments
        elif _POSITIONAL in metadata:
            if field.default is MISSING:
                needed.append(shown.metavar if shown and shown.metavar else field.name.upper())
        else:
            name = f"--{field.name.replace('_', '-')}"
            names = (name, *((shown.aliases if shown else None) or ()))
            options |= dict.fromkeys(names, _option(name, plain))
    return options, tuple(needed)


def _required(args: type) -> list[str]:
    """The options without a default."""
    hints = get_type_hints(args, include_extras=True)
    return [
        f"--{field.name.replace('_', '-')}"
        for field in fields(args)
        if field.default is MISSING and field.default_factory is MISSING
        if _POSITIONAL not in _parts(hints[field.name])[1] and not is_dataclass(_parts(hints[field.name])[0])
    ]


def _parts(hint: Any) -> tuple[Any, tuple[Any, ...]]:
    """A type without its annotations, and these."""
    if get_origin(hint) is not Annotated:
        return hint, ()
    plain, *metadata = get_args(hint)
    inner, more = _parts(plain)
    return inner, (*metadata, *more)


def _option(name: str, plain: Any) -> Option:
    """The option of a type: a flag, a number, a choice or text."""
    if plain is bool:
        return Option(name, "none")
    if get_origin(plain) is tuple:
        return Option(name, "many")
    kinds = get_args(plain) if get_origin(plain) in (Union, types.UnionType) else (plain,)
    choices = tuple(str(word) for kind in kinds if get_origin(kind) is Literal for word in get_args(kind))
    number = next((kind for kind in kinds if kind in (int, float)), None)
    return Option(name, "one", choices, number)
