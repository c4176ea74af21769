"""Compare the settings of a run's processes before any of them starts JAX."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any


def flatten(facts: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return {path: value} of the leaves of nested mappings, with paths such as `workload.batch`."""
    found: dict[str, Any] = {}
    for name, value in facts.items():
        found |= flatten(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {prefix + name: value}
    return found


def find_difference(facts: Mapping[int, Mapping[str, Any]]) -> str:
    """Return a line on the first setting that differs between processes; empty if all are equal.

    facts: {process number: its settings by path, from `flatten`}.
    """
    first = min(facts)
    for number in sorted(facts):
        here, there = facts[first], facts[number]
        for name in [*here, *(name for name in there if name not in here)]:
            if here.get(name) != there.get(name):
                return (
                    f"process {number} has {name} {_show(there.get(name))}, and process {first} has"
                    f" {_show(here.get(name))}; all processes of a run need the same arguments, files and versions"
                )
    return ""


def _show(value: Any) -> str:
    """Format a value in at most 60 characters."""
    text = "none" if value is None else value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
