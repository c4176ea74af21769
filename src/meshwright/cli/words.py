"""The words of a command line read into a command's dataclass, so that every mistake is one line.

An option may be unknown, have a new name, belong to another kind of plan, lack its value, or have a wrong one.
"""

from __future__ import annotations

import difflib
import re
import types
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from tyro.conf import Positional

from meshwright.cli.config_file import read_config_file
from meshwright.errors import MeshwrightError
from meshwright.field_types import not_a_choice
from meshwright.units import parse_count, parse_number

ALIASES = {"--mesh-dim": "--mesh", "--out": "--output", "--max-tokens": "--num-tokens", "--for": "--serve"}
"""Second names of options, which help does not list."""

NEW_NAMES = {
    "--sequence": "--sp-method gather|ring|ulysses",
    "--sequence-parallel": "--tp-stream split|whole",
    "--no-sequence-parallel": "--tp-stream whole",
    "--overlaps-tp": "--collective-matmul",
    "--no-overlaps-tp": "no --collective-matmul",
    "--compute-dtype": "--dtype",
}
"""Options of before, and what says it today."""

SUFFIXES = {"--svg": (".svg",), "--html": (".html", ".htm")}
"""How the names of files end that hold one kind of data, where they have an ending."""

CONFIG = "config"
"""The field of the option that names a file of options."""

_OPTION = re.compile(r"(-[A-Za-z]|--[A-Za-z][\w-]*)(=.*)?", re.DOTALL)
_WHOLE = re.compile(r"-?[0-9]{1,18}")
_POSITIONAL = get_args(Positional[str])[1]


@dataclass(frozen=True)
class Option:
    """One option or argument: its field, how many values it takes, and which; choices: as typed, with their value."""

    name: str
    field: str
    takes: Literal["none", "one", "many"]
    choices: Mapping[str, str | int]
    type: type[int | float | str | Path] = str
    is_needed: bool = False

    def read(self, value: str) -> int | float | str | Path:
        """A value of the field. Raises where it is not of the option's type, or not one of its choices."""
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


def canonical(words: Sequence[str]) -> list[str]:
    """The words with every option by its first name."""
    found = []
    for word in words:
        name, equals, value = word.partition("=")
        found.append(ALIASES.get(name, name) + equals + value if name in ALIASES else word)
    return found


def without_options(words: Sequence[str], names: Collection[str]) -> list[str]:
    """Words without some options that take one value each, by their first names, and these values."""
    found: list[str] = []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if word in names:
            rest = rest[1:]
        elif word.partition("=")[0] not in names:
            found.append(word)
    return found


def read_words(
    words: Sequence[str], args: type, *, kinds: Mapping[str, type], hints: Mapping[str, str]
) -> tuple[Any, dict[str, str]]:
    """Read the words of a command line.

    Args:
        words: of the command line, after the command.
        args: the dataclass of the arguments.
        kinds: the dataclasses of a command's other kinds, each under the words that ask for it.
        hints: what to use instead of an option of another kind, by its name.

    Returns:
        The arguments, an `args`; and the options among the words, as `{"batch": "--batch"}`.

    Raises:
        MeshwrightError: where the words are not options and arguments of the command.
    """
    known, declared = _declared(args)
    needed = [argument.name for argument in declared if argument.is_needed]
    rest, arguments = list(words), []
    found: dict[str, Any] = {}
    typed: dict[str, str] = {}
    while rest:
        word = rest.pop(0)
        if word == "--" and rest:
            arguments += rest
            break
        if not (match := _OPTION.fullmatch(word)):
            if word.startswith("-"):
                raise MeshwrightError(_unknown(word, args, kinds, hints))
            arguments.append(word)
            continue
        name, joined = match[1].replace("_", "-"), match[2]
        if name not in known:
            raise MeshwrightError(_unknown(name, args, kinds, hints))
        option = known[name]
        if option.field in typed:
            raise MeshwrightError(f"{option.name} stands twice; leave one out")
        typed[option.field] = option.name
        if option.takes == "none":
            if joined:
                raise MeshwrightError(f"{name} takes no value; leave {joined} out")
            found[option.field] = True
            continue
        values = [joined[1:]] if joined else []
        while rest and not _OPTION.fullmatch(rest[0]) and (option.takes == "many" or not values):
            values.append(rest.pop(0))
        if not any(values):
            hint = f"; one that begins with - is written {name}={rest[0]}" if rest and rest[0][:1] == "-" else ""
            raise MeshwrightError(f"{name} needs a value{hint}")
        read = tuple(option.read(value) for value in values)
        found[option.field] = read if option.takes == "many" else read[0]
    if typed.pop(CONFIG, None):
        said = {**found, **({declared[0].field: arguments[0]} if arguments else {})}
        for option, value, word in _of_file(found[CONFIG], args, said):
            if option in declared:
                arguments.insert(0, value)
            else:
                found[option.field], typed[option.field] = value, word
    if len(arguments) < len(needed):
        raise MeshwrightError(f"{needed[len(arguments)]} is missing; --help says what it is")
    if declared and declared[-1].takes == "many":
        first = len(declared) - 1
        several = tuple(declared[-1].read(value) for value in arguments[first:])
        found[declared[-1].field], arguments = several, arguments[:first]
    if len(arguments) > len(declared):
        takes = " and ".join(argument.name for argument in declared) or "only options"
        raise MeshwrightError(f"there is no place for {arguments[len(declared)]!r}: it takes {takes}; --help says more")
    for argument, value in zip(declared, arguments, strict=False):
        if not value.strip():
            raise MeshwrightError(f"{argument.name} is empty; --help says what it is")
        found[argument.field] = argument.read(value)
    if missing := [option.name for option in known.values() if option.is_needed and option.field not in typed]:
        raise MeshwrightError(f"{missing[0]} is missing; --help says what it takes")
    return _filled(args, found), typed


def _of_file(path: Path, args: type, said: Mapping[str, Any]) -> Iterator[tuple[Option, Any, str]]:
    """The options of a `--config` file that are not typed: each with its value, and its name."""
    options = {option.field: option for option in (*_declared(args)[0].values(), *_declared(args)[1])}
    for entry in read_config_file(path, [name for name in options if name != CONFIG]):
        if entry.name in said:
            continue
        option = options[entry.name]
        values = entry.values
        if option.takes == "one" and option.type is str and not option.choices:
            values = (",".join(values),) if values else ()  # As `fsdp=2,tp=4`, of a list or a mapping.
        wanted = {"none": 0, "one": 1}.get(option.takes, max(1, len(values)))
        if len(values) != wanted:
            takes = {"none": "true or false", "one": "one value"}.get(option.takes, "values")
            raise MeshwrightError(f"{entry.where}: {entry.name} takes {takes}, and has {len(values)} values")
        try:
            read = tuple(option.read(value) for value in values)
        except MeshwrightError as error:
            raise MeshwrightError(f"{entry.where}: {error}") from None
        yield option, read if option.takes == "many" else read[0] if read else True, option.name


def _filled(args: type, found: Mapping[str, Any]) -> Any:
    """A dataclass with the values of some fields, those of its groups too."""
    values: dict[str, Any] = {}
    for field in fields(args):
        if is_dataclass(group := field.default_factory):
            values[field.name] = _filled(group, found)  # pyright: ignore[reportArgumentType]
        elif field.name in found:
            values[field.name] = found[field.name]
    return args(**values)


def declared_options(args: type) -> Mapping[str, Option]:
    """The options of a command's dataclass, by each of their names."""
    return _declared(args)[0]


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
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.7)
    return f"there is no option {name}; {f'did you mean {near[0]}? ' if near else ''}--help lists them"


@cache
def _declared(args: type) -> tuple[dict[str, Option], tuple[Option, ...]]:
    """The options of a dataclass by each of their names, and its arguments in their order."""
    options: dict[str, Option] = {}
    arguments: list[Option] = []
    hints = get_type_hints(args, include_extras=True)
    for field in fields(args):
        plain, metadata = _parts(hints[field.name])
        shown = next((item for item in metadata if hasattr(item, "metavar")), None)
        is_needed = field.default is MISSING and field.default_factory is MISSING
        if is_dataclass(plain):
            inner, more = _declared(plain)  # pyright: ignore[reportArgumentType]
            options |= inner
            arguments += more
        elif _POSITIONAL in metadata:
            name = shown.metavar if shown and shown.metavar else field.name.upper()
            arguments.append(_option(name, field.name, plain, is_needed=is_needed))
        else:
            name = f"--{field.name.replace('_', '-')}"
            names = (name, *((shown.aliases if shown else None) or ()))
            options |= dict.fromkeys(names, _option(name, field.name, plain, is_needed=is_needed))
    return options, tuple(arguments)


def _parts(hint: Any) -> tuple[Any, tuple[Any, ...]]:
    """A type without its annotations, and these."""
    if get_origin(hint) is not Annotated:
        return hint, ()
    plain, *metadata = get_args(hint)
    inner, more = _parts(plain)
    return inner, (*metadata, *more)


def _option(name: str, field: str, plain: Any, *, is_needed: bool) -> Option:
    """The option of a type: a flag, a number, a choice or text."""
    if plain is bool:
        return Option(name, field, "none", {})
    if get_origin(plain) is tuple:
        return Option(name, field, "many", {}, int if get_args(plain)[0] is int else str, is_needed)
    kinds = get_args(plain) if get_origin(plain) in (Union, types.UnionType) else (plain,)
    choices = {str(word): word for kind in kinds if get_origin(kind) is Literal for word in get_args(kind)}
    of = next((kind for kind in kinds if kind in (int, float, Path)), str)
    return Option(name, field, "one", choices, of, is_needed)
