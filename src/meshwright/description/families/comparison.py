"""Compare two models field by field; fields of nested dataclasses have dotted names."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import Any, cast

from meshwright.description.step.model import ModelConfig


def features(model: ModelConfig) -> dict[str, Any]:
    """Return a model's fields by name; those of nested dataclasses by dotted name, such as `norms.epsilon`.

    A tuple of one value, such as a cycle over layers that are all alike, is replaced by the value.
    """
    return _flat(model, "")


def differences(one: ModelConfig, other: ModelConfig) -> dict[str, tuple[Any, Any]]:
    """Return (value of `one`, value of `other`) of each field in which two models differ, by name as in `features`."""
    ours, theirs = features(one), features(other)
    pairs = {name: (ours.get(name), theirs.get(name)) for name in ours | theirs}
    return {name: (mine, its) for name, (mine, its) in pairs.items() if mine != its}


def _flat(value: Any, name: str) -> dict[str, Any]:
    """Return the fields of a dataclass by dotted name, each with the prefix `name`; {name: value} for other values."""
    cycle: Any = value
    if isinstance(cycle, tuple) and len(cast(Any, cycle)) == 1:
        return _flat(value[0], name)
    if not is_dataclass(value):
        return {name: value}
    found: dict[str, Any] = {}
    for field in fields(value):
        found |= _flat(getattr(value, field.name), f"{name}.{field.name}" if name else field.name)
    return found
