"""Load the description of how a training framework runs a step, one of the project's TOML files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal

from meshwright.description.hardware.table import read_toml
from meshwright.description.step.strategy import XLA, Attention, FrameworkProfile, strategy_from_data
from meshwright.description.step.workload import Dtype, Remat
from meshwright.errors import MeshwrightError, did_you_mean, near_names
from meshwright.support.field_types import from_data

OURS = "meshwright"

DATA = Path(__file__).parent / "data"


@dataclass(frozen=True, kw_only=True)
class Framework:
    """How a training framework runs a step, and the meaning of its terms and option names."""

    title: str
    words: tuple[str, ...]  # Lower-case texts by which `find_framework` recognises it, such as parts of URLs.
    is_jax: bool = False
    profile: FrameworkProfile = XLA
    strategy: Mapping[str, Any] = field(default_factory=dict[str, Any])  # Values it fixes, by field of `Strategy`.
    attention: Mapping[str, Attention] = field(default_factory=dict[str, Attention])  # Kernel, by kind of chip.
    # The framework's word for a remat policy to our policy; the first word that occurs in a text decides.
    remat: Mapping[str, Remat] = field(default_factory=dict[str, Remat])
    # The framework's name of values that a policy can save to our names of them, such as `query key value`.
    saved: Mapping[str, str] = field(default_factory=dict[str, str])
    param_dtype: Dtype = "f32"  # Dtype of its parameters in published runs.
    always_fuses_attention: bool = False  # Whether it fuses attention even on chips older than fused kernels.
    most_zero_stage: Literal[0, 1, 2, 3] = 3  # Highest ZeRO stage that it supports.
    most_zero_stage_with_pp: Literal[0, 1, 2, 3] = 3  # Highest ZeRO stage that it supports with pipeline stages.
    # Default number of virtual stages in an interleaved schedule: the fewest or the most that the layers allow.
    virtual_stages: Literal["fewest", "most"] = "fewest"


def framework_names() -> tuple[str, ...]:
    """Return the names of the known frameworks in alphabetical order, without reading their files."""
    return tuple(sorted(path.stem for path in DATA.glob("*.toml")))


@cache
def load_framework(name: str) -> Framework:
    """Load a framework by name, such as `megatron-core`. The error for an unknown name suggests the nearest ones."""
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
    """Return True if a field of a framework's file has a `source`; raise otherwise. entry: the field; key: its name."""
    if not entry.get("source"):
        raise MeshwrightError(f"{name}.toml: {key} has no source")
    return True


def framework_fields(name: str | None, kind: str) -> dict[str, Any]:
    """Return the fields of `Strategy` that a framework fixes, and their values, on a kind of chip.

    Args:
        name: the framework; None for meshwright, which fixes none.
        kind: `tpu`, `gpu` or `cpu`.
    """
    if name is None:
        return {}
    framework = load_framework(name)
    kernel = {"attention": framework.attention[kind]} if kind in framework.attention else {}
    stage = {} if framework.most_zero_stage == 3 else {"zero_stage": framework.most_zero_stage}
    return {"profile": framework.profile, **kernel, **stage, **framework.strategy}


def find_framework(*texts: str) -> str | None:
    """Return the name of the framework that the first of the texts mentions; None if no text mentions one.

    If a text mentions several, the longest of their `words` decides.
    """
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
