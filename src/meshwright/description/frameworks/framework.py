"""Load how a training framework runs a step from the project's TOML files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal

from meshwright.description.hardware.table import read_toml
from meshwright.description.step.strategy import XLA, Attention, FrameworkProfile, strategy_from_data
from meshwright.description.step.workload import Remat
from meshwright.errors import MeshwrightError, did_you_mean, near_names
from meshwright.support.field_types import from_data

OURS = "meshwright"

DATA = Path(__file__).parent / "data"


@dataclass(frozen=True, kw_only=True)
class Framework:
    """How a training framework runs a step, and the meaning of its terms and option names."""

    title: str
    words: tuple[str, ...]  # Texts in lower case that name it, such as parts of addresses.
    is_jax: bool = False
    profile: FrameworkProfile = XLA
    strategy: Mapping[str, Any] = field(default_factory=dict[str, Any])  # Fields of `Strategy` that its steps have.
    attention: Mapping[str, Attention] = field(default_factory=dict[str, Attention])  # Kernel, by kind of chip.
    # The meaning of each word of its remat policies; the first word found in a text counts.
    remat: Mapping[str, Remat] = field(default_factory=dict[str, Remat])
    # Its names of values that a policy may save, each with ours, such as `query key value`.
    saved: Mapping[str, str] = field(default_factory=dict[str, str])
    always_fuses_attention: bool = False  # Even on chips older than fused attention.
    most_zero_stage: Literal[0, 1, 2, 3] = 3  # Highest ZeRO stage that it has.
    most_zero_stage_with_pp: Literal[0, 1, 2, 3] = 3  # Highest ZeRO stage under a pipeline.
    # Default number of virtual stages in an interleaved schedule: the fewest or the most that the layers allow.
    virtual_stages: Literal["fewest", "most"] = "fewest"


def framework_names() -> tuple[str, ...]:
    """Return the names of the known frameworks in alphabetical order; reads no file."""
    return tuple(sorted(path.stem for path in DATA.glob("*.toml")))


@cache
def load_framework(name: str) -> Framework:
    """Load a framework by name, as `megatron-core`. Raises for an unknown name, with the nearest known ones."""
    if name not in framework_names():
        near = did_you_mean(near_names(name, framework_names()))
        raise MeshwrightError(f"no framework {name!r}; {near}known are {', '.join(framework_names())}")
    data = read_toml(DATA / f"{name}.toml")
    groups = ("profile", "strategy", "attention", "remat", "saved", "rules")
    values = {
        group: {key: entry["value"] for key, entry in data.pop(group, {}).items() if _has_source(entry, name, key)}
        for group in groups
    }
    strategy_from_data(values["strategy"])
    if name != OURS:
        values["profile"]["name"] = name
    return from_data(Framework, data | values.pop("rules") | values, f"{name}.toml")


def _has_source(entry: Mapping[str, Any], name: str, key: str) -> bool:
    """Return True if a field names its source; raise otherwise."""
    if not entry.get("source"):
        raise MeshwrightError(f"{name}.toml: {key} has no source")
    return True


def framework_fields(name: str | None, kind: str) -> dict[str, Any]:
    """Return the fields of `Strategy` that a framework fixes on a kind of chip, `tpu`, `gpu` or `cpu`.

    name: None for meshwright, which fixes none.
    """
    if name is None:
        return {}
    framework = load_framework(name)
    kernel = {"attention": framework.attention[kind]} if kind in framework.attention else {}
    stage = {} if framework.most_zero_stage == 3 else {"zero_stage": framework.most_zero_stage}
    return {"profile": framework.profile, **kernel, **stage, **framework.strategy}


def find_framework(*texts: str) -> str | None:
    """Return the framework named in the first text that names any; the longest name counts. None if there is none."""
    for text in texts:
        found = [
            (len(word), name)
            for name in framework_names()
            for word in load_framework(name).words
            if word in text.lower()
        ]
        if found:
            return max(found)[1]
    return None
