"""Annotations that declare an option, a field of a dataclass: how commands show it and which setting it sets."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import fields, is_dataclass
from typing import Annotated, Any, Literal, NamedTuple, get_type_hints


class Setting(NamedTuple):
    """The field of a run's config that an option sets, and whether a resumed run can change it.

    path: the field's path in `RunConfig`, as `optimizer.learning_rate`. resume: when a resumed run can change it:
    `free`: always; `change`: only with `change=True` (--change); `never`: not at all, because the first state or the
    checkpoints depend on it.
    """

    path: str
    resume: Literal["free", "change", "never"] = "change"


class Keyword(NamedTuple):
    """The type of the library's keyword argument, as source text, where it differs from the command-line option's."""

    type: str


class CommandLine(NamedTuple):
    """How the command line shows a field.

    metavar: the placeholder of its value in the help. aliases: further names of the option. is_positional: whether the
    field is a positional argument instead of an option.
    """

    metavar: str = ""
    aliases: tuple[str, ...] = ()
    is_positional: bool = False


def option(metavar: str = "", *aliases: str) -> CommandLine:
    """Declare that a field is an option, `--` and the field's name. The field's docstring is the help text."""
    return CommandLine(metavar, aliases)


def positional(metavar: str) -> CommandLine:
    """Declare that a field is a positional argument. The field's docstring is the help text."""
    return CommandLine(metavar, is_positional=True)


CountText = Annotated[str | None, option("N"), Keyword("Count | None")]
ShareText = Annotated[str | None, option("SHARE"), Keyword("float | str | None")]
Mesh = Annotated[str | None, option("MESH"), Keyword("MeshLike | None")]
Json = Annotated[bool, option()]
CompileCache = Annotated[str | None, option("DIRECTORY|off"), Keyword("str | Path | None")]


def given_options(*groups: Any, without: Collection[str] = ()) -> dict[str, Any]:
    """Return the values of the options in dataclass instances, by name; None for an option that is False or ().

    groups: the instances; fields that are dataclasses are left out. without: names of options to leave out.
    """
    found: dict[str, Any] = {}
    for group in groups:
        for field in fields(group):
            if field.name not in without and not is_dataclass(value := getattr(group, field.name)):
                found[field.name] = None if value is False or value == () else value
    return found


def declared_settings(*groups: type) -> Mapping[str, Setting]:
    """Return the `Setting` of each option that declares one, by the option's name. groups: dataclasses of options."""
    hints = {name: hint for group in groups for name, hint in get_type_hints(group, include_extras=True).items()}
    return {
        name: item
        for name, hint in hints.items()
        for item in getattr(hint, "__metadata__", ())
        if isinstance(item, Setting)
    }
