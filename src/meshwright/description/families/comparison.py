"""A model's fields by name, those of its parts too: how two models differ, and what a file says of one."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import Any, cast

from meshwright.description.step.model import ModelConfig


def features(model: ModelConfig) -> dict[str, Any]:
    """Return a model's fields by name, those of its parts as `norms.epsilon`; of a cycle of one layer, that layer's."""
    return _flat(model, "")


def differences(one: ModelConfig, other: ModelConfig) -> dict[str, tuple[Any, Any]]:
    """Return the values of fields in which two models differ, by name as in `features`."""
    ours, theirs = features(one), features(other)
    pairs = {name: (ours.get(name), theirs.get(name)) for name in ours | theirs}
    return {name: (mine, its) for name, (mine, its) in pairs.items() if mine != its}


def _flat(value: Any, name: str) -> dict[str, Any]:
    """Return the fields of dataclasses within dataclasses by dotted name."""
    cycle: Any = value
    if isinstance(cycle, tuple) and len(cast(Any, cycle)) == 1:
        return _flat(value[0], name)
    if not is_dataclass(value):
        return {name: value}
    found: dict[str, Any] = {}
    for field in fields(value):
        found |= _flat(getattr(value, field.name), f"{name}.{field.name}" if name else field.name)
    return found
