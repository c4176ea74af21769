"""What was typed compared with what a command reads: an option that changes nothing is refused by name.

A command gets its arguments from `watch`, which notes each field that is read. When it has read all that it will use,
and before any work, it calls `check_all_read`. An option that only one mode of a command uses is read in that mode
alone, so that no list of combinations is kept anywhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar

from meshwright.errors import MeshwrightError

T = TypeVar("T")

_NOTES = "_notes_of_reads"


class _Notes:
    """The options of one call: how each was typed, by field, and the fields that were read."""

    def __init__(self, typed: Mapping[str, str]) -> None:
        self.typed = typed
        self.read: set[str] = set()


def watch(args: T, typed: Mapping[str, str]) -> T:
    """The same arguments, which note what is read of them.

    Args:
        args: a command's dataclass, whose groups of options are dataclasses too.
        typed: the options that stand on the command line, as `{"batch": "--batch"}`.
    """
    return _watched(args, _Notes(typed))


def check_all_read(args: Any, where: str = "here") -> None:
    """Raise where an option was typed and has not been read.

    Args:
        args: as `watch` returned them; of a plain dataclass, made in Python, there is nothing to check.
        where: what the command does, so that the other options change nothing, as `beside --sweep`.
    """
    notes: _Notes | None = getattr(args, _NOTES, None)
    if notes is None:
        return
    for field, option in notes.typed.items():
        if field not in notes.read:
            raise MeshwrightError(f"{option} changes nothing {where}; leave it out")


def _watched(args: Any, notes: _Notes) -> Any:
    """An instance of a subclass, so that it is still a dataclass of the command's type."""
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
