"""Reject options that have no effect, by name.

A command gets its arguments from `watch`, which records each field that is read. After reading all fields that it uses,
and before any work, it calls `check_all_read`. Options of one mode of a command are read only in that mode, so that no
list of combinations is needed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar

from meshwright.errors import MeshwrightError

T = TypeVar("T")

_NOTES = "_notes_of_reads"


class _Notes:
    """The options of one call: how each was typed, by field, and which fields were read."""

    def __init__(self, typed: Mapping[str, str]) -> None:
        self.typed = typed
        self.read: set[str] = set()


def watch(args: T, typed: Mapping[str, str]) -> T:
    """Return the arguments, wrapped so that fields that are read are recorded.

    Args:
        args: a command's dataclass, whose groups of options are dataclasses too.
        typed: options on the command line, as `{"batch": "--batch"}`.
    """
    return _watched(args, _Notes(typed))


def check_all_read(args: Any, where: str = "here") -> None:
    """Raise an error if an option was typed but not read.

    Args:
        args: the result of `watch`; a dataclass created in Python is not checked.
        where: for the message: where the option has no effect, as `with --sweep`.
    """
    notes: _Notes | None = getattr(args, _NOTES, None)
    if notes is None:
        return
    for field, option in notes.typed.items():
        if field not in notes.read:
            raise MeshwrightError(f"{option} has no effect {where}; leave it out")


def _watched(args: Any, notes: _Notes) -> Any:
    """Return a copy of the arguments that records each field that is read: an instance of a subclass of their type."""
    kind = type(args)
    names = {field.name for field in fields(args)}
    groups = {name: _watched(value, notes) for name in names if is_dataclass(value := getattr(args, name))}

    def get(self: Any, name: str) -> Any:
        if name in groups:
            return groups[name]
        if name in names:
            notes.read.add(name)
        elif name == "__dict__":
            notes.read |= names  # `vars(args)` reads them all.
        return object.__getattribute__(self, name)

    found = object.__new__(type(kind.__name__, (kind,), {"__getattribute__": get, _NOTES: notes}))
    object.__getattribute__(found, "__dict__").update(object.__getattribute__(args, "__dict__"))
    return found
