"""Parse the words of a command line into a command's dataclass, so that every mistake is reported in one line.

An option may be unknown, renamed, of another kind of plan, or without a valid value.

Written by hand because libraries reject fewer mistakes: of the 737 calls of tests/cli/test_battery.py argparse passes
638, tyro 640, cyclopts 670, or 731 with its exceptions mapped to the messages here. cyclopts takes 90 ms to be imported
and to parse `plan` (this module 10 ms) and has no lines of a --config file, kinds of a command or renamed options.
click has no option with several values.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from meshwright.cli.words.config_file import read_config_file
from meshwright.cli.words.options import Option, declared_words
from meshwright.errors import MeshwrightError, did_you_mean
from meshwright.mesh import our_axis

ALIASES = {"--mesh-dim": "--mesh", "--out": "--output", "--max-tokens": "--num-tokens", "--for": "--serve"}
"""Second names of options, which help does not list."""

NEW_NAMES = {
    "--sequence": "--sp-method gather|ring|ulysses",
    "--sequence-parallel": "--tp-stream split|whole",
    "--no-sequence-parallel": "--tp-stream whole",
    "--overlaps-tp": "--collective-matmul",
    "--no-overlaps-tp": "no --collective-matmul",
    "--compute-dtype": "--dtype",
    "--rows": "--batch N",
}
"""Renamed options, with the text to type now."""

CONFIG = "config"
"""The field of the option that names a file of options."""

_OPTION = re.compile(r"(-[A-Za-z]|--[A-Za-z][\w-]*)(=.*)?", re.DOTALL)


def canonical(words: Sequence[str]) -> list[str]:
    """Return the words, with every option under its first name."""
    found = []
    for word in words:
        name, equals, value = word.partition("=")
        found.append(ALIASES.get(name, name) + equals + value if name in ALIASES else word)
    return found


def without_options(words: Sequence[str], names: Collection[str]) -> list[str]:
    """Return the words without some options (by their first names) and their values."""
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
    """Parse the words of a command line.

    Args:
        words: the words of the command line after the command.
        args: the dataclass of the arguments.
        kinds: the dataclasses of all kinds of the command's arguments, by their names in messages.
        hints: for options of other kinds, the option of this kind to use instead.

    Returns:
        An instance of `args`, and the options that were typed or in a file, as `{"batch": "--batch"}`.

    Raises:
        MeshwrightError: the words are not valid options and arguments of the command.
    """
    known, declared = declared_words(args)
    found, typed, arguments = _separate(words, known, lambda name: _unknown(name, args, kinds, hints))
    if typed.pop(CONFIG, None):
        typed_values = {**found, **({declared[0].field: arguments[0]} if arguments else {})}
        for option, value, word in _options_in_file(found[CONFIG], args, typed_values):
            if option in declared:
                arguments.insert(0, value)
            else:
                found[option.field], typed[option.field] = value, word
    found |= _read_arguments(arguments, declared)
    if missing := [option.name for option in known.values() if option.is_needed and option.field not in typed]:
        raise MeshwrightError(f"{missing[0]} is missing; --help says what it takes")
    return _filled(args, found), typed


def _separate(
    words: Sequence[str], known: Mapping[str, Option], unknown: Callable[[str], str]
) -> tuple[dict[str, Any], dict[str, str], list[str]]:
    """Split words into the values of options, the names they were typed with (both by field), and arguments.

    known: the options by name. unknown: returns the message for an unknown option.
    """
    found: dict[str, Any] = {}
    typed: dict[str, str] = {}
    rest, arguments = list(words), []
    while rest:
        word = rest.pop(0)
        if word == "--" and rest:
            arguments += rest
            break
        if not (match := _OPTION.fullmatch(word)):
            if word.startswith("-"):
                raise MeshwrightError(unknown(word))
            arguments.append(word)
            continue
        name, joined = match[1].replace("_", "-"), match[2]
        if name not in known:
            raise MeshwrightError(unknown(name))
        option = known[name]
        if option.field in typed:
            raise MeshwrightError(f"{option.name} is given twice; leave one out")
        typed[option.field] = option.name
        found[option.field] = _take_value(option, name, joined, rest)
    return found, typed, arguments


def _take_value(option: Option, name: str, joined: str | None, rest: list[str]) -> Any:
    """Return the value of an option typed as `name`, from `--name=8` or from the words after it."""
    if option.takes == "none":
        if joined:
            raise MeshwrightError(f"{name} takes no value; leave {joined} out")
        return True
    values = [joined[1:]] if joined else []
    while rest and not _OPTION.fullmatch(rest[0]) and (option.takes == "many" or not values):
        values.append(rest.pop(0))
    if not any(values):
        hint = f"; one that begins with - is written {name}={rest[0]}" if rest and rest[0][:1] == "-" else ""
        raise MeshwrightError(f"{name} needs a value{hint}")
    read = tuple(option.read(value) for value in values)
    return read if option.takes == "many" else read[0]


def _read_arguments(arguments: Sequence[str], declared: Sequence[Option]) -> dict[str, Any]:
    """Return the values of a command's arguments by field; the last declared argument may take all remaining words."""
    found: dict[str, Any] = {}
    needed = [argument.name for argument in declared if argument.is_needed]
    if len(arguments) < len(needed):
        raise MeshwrightError(f"{needed[len(arguments)]} is missing; --help says what it is")
    if declared and declared[-1].takes == "many":
        first = len(declared) - 1
        found[declared[-1].field] = tuple(declared[-1].read(value) for value in arguments[first:])
        arguments = arguments[:first]
    if len(arguments) > len(declared):
        takes = " and ".join(argument.name for argument in declared) or "only options"
        raise MeshwrightError(f"there is no place for {arguments[len(declared)]!r}: it takes {takes}; --help says more")
    for argument, value in zip(declared, arguments, strict=False):
        if not value.strip():
            raise MeshwrightError(f"{argument.name} is empty; --help says what it is")
        found[argument.field] = argument.read(value)
    return found


def _options_in_file(path: Path, args: type, typed_values: Mapping[str, Any]) -> Iterator[tuple[Option, Any, str]]:
    """Yield (option, value, name as `--batch`) for each option in a `--config` file that was not typed.

    typed_values: the typed values, by field.
    """
    options = {option.field: option for option in (*declared_words(args)[0].values(), *declared_words(args)[1])}
    for entry in read_config_file(path, [name for name in options if name != CONFIG]):
        if entry.name in typed_values:
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
    """Return an instance of a dataclass with some fields set. found: values by field, also of groups of options."""
    values: dict[str, Any] = {}
    for field in fields(args):
        if is_dataclass(group := field.default_factory):
            values[field.name] = _filled(group, found)  # pyright: ignore[reportArgumentType]
        elif field.name in found:
            values[field.name] = found[field.name]
    return args(**values)


def _unknown(name: str, args: type, kinds: Mapping[str, type], hints: Mapping[str, str]) -> str:
    """Return the error message for an option that a command does not have."""
    known = declared_words(args)[0]
    new = NEW_NAMES.get(name, "")
    if new and any(new.split()[0] in declared_words(kind)[0] for kind in (args, *kinds.values())):
        return f"{name} is now {new}"
    this = next((kind for kind, declared in kinds.items() if declared is args), "")
    for other, declared in kinds.items():
        if name in declared_words(declared)[0]:
            hint = f"use {hints[name]}" if name in hints else "leave it out"
            return f"{name} is an option of {other}, and this is {this}; {hint}"
    degree = name.removeprefix("--").removeprefix("parallelism.").replace("-", "_")
    if "--mesh" in known and (ours := our_axis(degree)):
        return f"there is no option {name}; here that is a degree of --mesh: {ours}"
    hint = did_you_mean(difflib.get_close_matches(name, known, n=1, cutoff=0.7))
    return f"there is no option {name}; {hint}--help lists them"
