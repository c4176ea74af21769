"""Check the fields of dataclasses against their annotations: on construction, and when read from plain data.

A wrong value from a file, a notebook or the command line, which no type checker sees, raises a one-line error that
names the field.
"""

from __future__ import annotations

import contextlib
import difflib
import math
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from meshwright.errors import MeshwrightError, did_you_mean

T = TypeVar("T")
Check = Callable[[Any], bool]
Readers = Mapping[Any, Callable[[Any, str], Any]]
"""By type, a function (value as plain data, path of its field) -> value that replaces the default reading."""

_PLAIN = {
    int: "a whole number",
    float: "a number",
    bool: "True or False",
    str: "text",
    Path: "a path",
    type(None): "None",
}
"""Names of the plain types in messages."""


def check_fields(thing: object) -> None:
    """Raise if a dataclass field is not of its type: an int passes as a float; True is no number, NaN no float."""
    for name, hint, is_of in _checks(type(thing)):
        if not is_of(value := getattr(thing, name)):
            raise MeshwrightError(_wrong(name, value, hint))


def check_value(name: str, value: object, hint: Any) -> None:
    """Raise if a value is not of an annotated type; `name` is what the message calls it."""
    if not _check(hint)(value):
        raise MeshwrightError(_wrong(name, value, hint))


def not_a_choice(name: str, value: object, choices: Iterable[object]) -> str:
    """Return the message for a value that is not one of a field's choices, with the nearest choice."""
    words = [str(choice) for choice in choices]
    hint = did_you_mean(difflib.get_close_matches(value, words, n=1) if isinstance(value, str) else ())
    return f"{name} is {value!r}; {hint}it is one of {', '.join(words)}"


def from_data(kind: type[T], data: Any, path: str = "", readers: Readers = types.MappingProxyType({})) -> T:
    """Read a dataclass from plain data as `dataclasses.asdict` returns it, for example from an edited file.

    Args:
        kind: the dataclass.
        data: its fields by name, including those of nested dataclasses.
        path: the position of the data in its file, as `workload.model`, for messages.
        readers: functions that read the values of some types, instead of the default reading.

    Raises:
        MeshwrightError: a field is missing, unknown or not of its type; the message names it.
    """
    if not isinstance(data, Mapping):
        raise MeshwrightError(f"{path or 'it'} is {data!r}; it is an object, fields by name")
    declared = {field.name: field for field in fields(kind) if field.init}  # pyright: ignore[reportArgumentType]
    start = f"{path}." if path else ""
    for name, field in declared.items():
        if name not in data and field.default is MISSING and field.default_factory is MISSING:
            near = difflib.get_close_matches(name, [str(other) for other in data if other not in declared], n=1)
            hint = f"; there is {near[0]}, which is no field" if near else ""
            raise MeshwrightError(f"{start}{name} is missing{hint}")
    for name in data:
        if name not in declared:
            near = difflib.get_close_matches(str(name), declared, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise MeshwrightError(f"{start}{name} is not a known field{hint}")
    hints = _hints(kind)
    return kind(**{name: _read(hints[name], value, f"{start}{name}", readers) for name, value in data.items()})


def nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return dotted names as nested mappings: {"norms.epsilon": 1e-5} becomes {"norms": {"epsilon": 1e-5}}."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        part, _, field = name.partition(".")
        if field:
            found.setdefault(part, {})[field] = value
        else:
            found[part] = value
    return found


def _read(hint: Any, value: Any, path: str, readers: Readers) -> Any:
    """Return a field's value, read from plain data. hint: its annotation. path: the field's, for messages."""
    if hint in readers:
        return readers[hint](value, path)
    origin, options = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType) and any(map(is_dataclass, options)):
        if value is None and type(None) in options:
            return None
        if isinstance(value, Mapping) or not any(map(_choices, options)):
            return _read(_dataclass_of(options, value), value, path, readers)
    if is_dataclass(hint):
        return from_data(hint, value, path, readers)  # pyright: ignore[reportArgumentType]
    for kind in options or (hint,):
        if isinstance(kind, type) and issubclass(kind, Enum) and value in [one.value for one in kind]:
            return kind(value)
    if origin is tuple and isinstance(value, (list, tuple)):
        return tuple(_read(options[0], item, f"{path}[{number}]", readers) for number, item in enumerate(value))
    # YAML 1.1 reads 1e-5, without a point, as text.
    if float in (hint, *options) and isinstance(value, str) and "e" in value.lower():
        with contextlib.suppress(ValueError):
            value = float(value)
    if not _check(hint)(value):
        raise MeshwrightError(_wrong(path, value, hint))
    return value


def _dataclass_of(options: tuple[Any, ...], data: Any) -> Any:
    """Return the first dataclass whose fields are exactly the keys of the data, else the first dataclass."""
    found = [option for option in options if is_dataclass(option)]
    names = set(data) if isinstance(data, Mapping) else set()
    return next((one for one in found if names == {field.name for field in fields(one)}), found[0])


def _wrong(name: str, value: object, hint: Any) -> str:
    """Return the message for a value that is not of a type."""
    options = _options(hint)
    if choices := [choice for option in options for choice in _choices(option)]:
        others = [None] if type(None) in options else []
        others += ["an object"] if any(map(is_dataclass, options)) else []
        return not_a_choice(name, value, [*choices, *others])
    return f"{name} is {value!r}; it is {_in_words(hint)}"


def _options(hint: Any) -> tuple[Any, ...]:
    """Return the members of a union; for another type, a tuple of that type."""
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def _choices(option: Any) -> tuple[Any, ...]:
    """Return the values that a `Literal` or an enum allows; empty for other types."""
    if get_origin(option) is Literal:
        return get_args(option)
    return tuple(one.value for one in option) if isinstance(option, type) and issubclass(option, Enum) else ()


def _in_words(option: Any) -> str:
    """Describe a type in words, for messages."""
    if len(options := _options(option)) > 1:
        return " or ".join(map(_in_words, options))
    if get_origin(option) in (tuple, Sequence):
        return f"a list, of which each is {_in_words(get_args(option)[0])}"
    if isinstance(get_origin(option), type) and issubclass(get_origin(option), Mapping):
        return f"an object, in which each is {_in_words(get_args(option)[1])}"
    return _PLAIN.get(option) or f"a {getattr(option, '__name__', option)}"


@cache
def _hints(kind: type) -> Mapping[str, Any]:
    """Return the types of a dataclass's fields, by name."""
    return get_type_hints(kind)


@cache
def _checks(kind: type) -> tuple[tuple[str, Any, Check], ...]:
    """Return each field of a dataclass: its name, its type and a check of its values."""
    hints = _hints(kind)
    return tuple((field.name, hints[field.name], _check(hints[field.name])) for field in fields(kind))


@cache
def _check(hint: Any) -> Check:
    """Return a predicate: whether a value is of a type.

    Annotations other than plain types, choices, dataclasses and collections of these accept every value.
    """
    origin, options = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        checks = [_check(option) for option in options]
        return lambda value: any(check(value) for check in checks)
    if origin is Literal:
        kinds, allowed = tuple(map(type, options)), frozenset(map(repr, options))
        return lambda value: isinstance(value, kinds) and repr(value) in allowed
    if hint is float:
        return lambda value: isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if hint is int:
        return lambda value: isinstance(value, int) and not isinstance(value, bool)
    if origin is tuple and options[1:] == (...,):
        check = _check(options[0])
        return lambda value: isinstance(value, tuple) and all(map(check, value))
    if origin is Sequence:
        check = _check(options[0])
        return lambda value: (
            isinstance(value, Sequence) and not isinstance(value, (str, bytes)) and all(map(check, value))
        )
    if isinstance(origin, type) and issubclass(origin, Mapping):
        key, item = map(_check, options)
        return lambda value: isinstance(value, Mapping) and all(map(key, value)) and all(map(item, value.values()))
    if isinstance(hint, type) and (hint in _PLAIN or is_dataclass(hint) or issubclass(hint, Enum)):
        return lambda value: isinstance(value, hint)
    return lambda value: True
