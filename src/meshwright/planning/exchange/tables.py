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
    """The options of one framework, and the fields of a plan that they set.

    A field is a mesh axis, a field of `Workload` or `Strategy`, or a field of the model (`model.embed`,
    `experts.count`). The name of an option includes its sections, joined by dots; the name of a flag has no dashes in
    front.
    """

    title: str
    format: Format
    source: str  # The file in the framework's repository that declares the options.
    mesh_dim: tuple[str, ...] = ()  # The mesh axes in its option `mesh_dim`, in order; empty if it has no such option.
    models: Mapping[str, str] = field(default_factory=dict[str, str])  # The framework's name of a preset, by preset.
    # (layers, width, mlp, heads, vocabulary) of the models that the framework has by name.
    configs: Mapping[str, tuple[int, ...]] = field(default_factory=dict[str, Any])
    numbers: Mapping[str, str] = field(default_factory=dict[str, str])  # By numeric option: the field that it sets.
    # By option: the field that it sets, and the field's value for each word. If several words have the same value, the
    # first is written.
    words: Mapping[str, Mapping[str, Mapping[str, Any]]] = field(default_factory=dict[str, Any])
    defaults: Mapping[str, Any] = field(default_factory=dict[str, Any])  # The framework's defaults, by option.
    fixed: Mapping[str, Any] = field(default_factory=dict[str, Any])  # Values of fields that no option sets, by field.
    # By option of the model's structure: the values with which a model can be read from sizes; the first is written.
    structure: Mapping[str, tuple[Any, ...]] = field(default_factory=dict[str, Any])
    # By option: the only value that can be read, and why.
    only: Mapping[str, tuple[Any, str]] = field(default_factory=dict[str, Any])
    # Options that set fields together and are read by the framework's module, each with its meaning here.
    parts: Mapping[str, str] = field(default_factory=dict[str, str])
    # By reason: patterns of the names of options that do not affect a step.
    nothing: Mapping[str, tuple[str, ...]] = field(default_factory=dict[str, Any])
    unsaid: Mapping[str, str] = field(default_factory=dict[str, str])  # By field: why no option sets it.


def named_options(table: OptionTable) -> tuple[str, ...]:
    """Return the names of the options in a table that have an effect on a step."""
    return (*table.numbers, *table.words, *table.parts, *table.structure, *table.only)


def exchange_names() -> tuple[str, ...]:
    """Return the names of the frameworks whose settings can be read, in alphabetical order."""
    return tuple(sorted(path.stem for path in DATA.glob("*.toml")))


@cache
def load_table(name: str) -> OptionTable:
    """Return the table of a framework. Raises for an unknown name; the message has similar names."""
    if name not in exchange_names():
        near = did_you_mean(near_names(name, exchange_names()))
        raise MeshwrightError(f"no settings of {name!r}; {near}known are {', '.join(exchange_names())}")
    data: dict[str, Any] = read_toml(DATA / f"{name}.toml")
    data["mesh_dim"] = tuple(data.get("mesh_dim", ()))
    return OptionTable(**data)
