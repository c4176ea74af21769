"""The tables of other frameworks' options, from the TOML files in `data`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal

from meshwright.description.hardware.table import read_toml
from meshwright.errors import MeshwrightError, did_you_mean, near_names

DATA = Path(__file__).parent / "data"

Format = Literal["yaml", "toml", "flags"]


@dataclass(frozen=True, kw_only=True)
class OptionTable:
    """The options of one framework.

    Values are fields: a mesh axis, a field of `Workload` or `Strategy`, or of the model (`model.embed`,
    `experts.count`). An option's name has its sections, joined by dots; a flag's name has no dashes.
    """

    title: str
    format: Format
    source: str  # The repository's file with the options.
    mesh_dim: tuple[str, ...] = ()  # The axes of its option `mesh_dim`, in order; empty: it has none.
    models: Mapping[str, str] = field(
        default_factory=dict[str, str]
    )  # Its name of a preset, by the preset's name here.
    # Layers, width, mlp, heads and vocabulary of a model that it has by name.
    configs: Mapping[str, tuple[int, ...]] = field(default_factory=dict[str, Any])
    numbers: Mapping[str, str] = field(default_factory=dict[str, str])  # Field, by option.
    # Field and what each word means, by option; the first of several words with one meaning is written.
    words: Mapping[str, Mapping[str, Mapping[str, Any]]] = field(default_factory=dict[str, Any])
    defaults: Mapping[str, Any] = field(default_factory=dict[str, Any])  # Values of options that a file leaves out.
    fixed: Mapping[str, Any] = field(default_factory=dict[str, Any])  # Fields with one value, which no option sets.
    # Values with which an option describes a decoder that is read from sizes; the first is written.
    structure: Mapping[str, tuple[Any, ...]] = field(default_factory=dict[str, Any])
    only: Mapping[str, tuple[Any, str]] = field(default_factory=dict[str, Any])  # The one value that is read, and why.
    # Options that set a field together, read by the framework's module, each with its meaning here.
    parts: Mapping[str, str] = field(default_factory=dict[str, str])
    # Patterns of options that do not affect a step, by the reason.
    nothing: Mapping[str, tuple[str, ...]] = field(default_factory=dict[str, Any])
    unsaid: Mapping[str, str] = field(default_factory=dict[str, str])  # Why no option sets a field, by field.


def named_options(table: OptionTable) -> tuple[str, ...]:
    """Return the options in a table, without those that have no effect on a step."""
    return (*table.numbers, *table.words, *table.parts, *table.structure, *table.only)


def exchange_names() -> tuple[str, ...]:
    """Return the names of the frameworks whose settings are read, in alphabetical order."""
    return tuple(sorted(path.stem for path in DATA.glob("*.toml")))


@cache
def load_table(name: str) -> OptionTable:
    """Load the table of a framework. Raises for an unknown name, with the nearest known ones."""
    if name not in exchange_names():
        near = did_you_mean(near_names(name, exchange_names()))
        raise MeshwrightError(f"no settings of {name!r}; {near}known are {', '.join(exchange_names())}")
    data: dict[str, Any] = read_toml(DATA / f"{name}.toml")
    data["mesh_dim"] = tuple(data.get("mesh_dim", ()))
    return OptionTable(**data)
