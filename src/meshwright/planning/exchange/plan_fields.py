"""Convert a plan to a flat mapping from field to value, and back.

Fields without effect on the plan are left out, so that two plans that run alike have equal mappings.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from meshwright.description.families.comparison import features
from meshwright.description.families.registry import FAMILIES, PRESETS, model_from_data
from meshwright.description.step.model import Experts, Model, ModelConfig
from meshwright.description.step.strategy import DEFAULT, XLA, Strategy
from meshwright.description.step.workload import Workload
from meshwright.errors import MeshwrightError
from meshwright.mesh import AXES, MeshShape
from meshwright.support.field_types import nested

SIZES = ("num_layers", "embed", "mlp", "num_heads", "num_kv_heads", "head_dim", "vocab")
"""Fields that a model must have."""

THETA = "model.positions.frequencies.theta"

OVERLAPS = ("overlaps_gradients", "overlaps_weights")
"""Fields of `Strategy.profile` that options of other frameworks set."""

_NEEDS = {
    "zero_stage": "fsdp",
    "schedule": "pp",
    "virtual_stages": "pp",
    "tp_stream": "tp",
    "collective_matmul": "tp",
    "sp_method": "sp",
}
"""Fields of a strategy that have an effect only if a mesh axis is larger than 1, and that axis."""


def plan_fields(workload: Workload, mesh: MeshShape, strategy: Strategy) -> dict[str, Any]:
    """Return the values of a plan's fields by name: mesh axes, and fields of the workload and of the strategy.

    Fields of the model are named `model.embed`, those of its experts `experts.count`.

    Raises:
        MeshwrightError: the model is a list of ops, which has no such fields.
    """
    if not isinstance(workload.model, ModelConfig):
        raise MeshwrightError(f"{workload.model.name} is written as ops, which no other framework's settings describe")
    found: dict[str, Any] = dict(mesh.degrees)
    found |= {field.name: getattr(workload, field.name) for field in fields(Workload) if field.name != "model"}
    for field in fields(Strategy):
        axis = _NEEDS.get(field.name)
        if field.name != "profile" and (axis is None or mesh.degree(axis) > 1):
            found[field.name] = getattr(strategy, field.name)
    found |= {name: getattr(strategy.profile, name) for name in OVERLAPS}
    found["gradient_dtype"] = strategy.gradient_dtype or workload.compute_dtype
    found["moment_dtype"] = strategy.moment_dtype or workload.param_dtype
    model = workload.model
    of_model = features(replace(model, lora=None)) | {"lora": model.lora}
    found |= {f"model.{name}": of for name, of in of_model.items() if not name.startswith(("name", "experts"))}
    if model.experts:
        found |= {f"experts.{field.name}": getattr(model.experts, field.name) for field in fields(Experts)}
    return found


def model_of(found: Mapping[str, Any], name: str, missing: str) -> Model:
    """Return the model that the fields `model.*` and `experts.*` describe; a preset, if one has the same fields.

    name: the model's name, if it is not a preset. missing: the end of the error message if a size is missing.
    """
    sizes = {field.removeprefix("model."): value for field, value in found.items() if field.startswith("model.")}
    if without := [size for size in SIZES if size not in sizes]:
        raise MeshwrightError(f"{', '.join(without)} of the model {'is' if len(without) == 1 else 'are'} {missing}")
    experts = {field.removeprefix("experts."): value for field, value in found.items() if field.startswith("experts.")}
    family = FAMILIES["mixtral" if experts else "llama"]
    rotary = {"frequencies": [{"theta": sizes.pop(THETA.removeprefix("model."), 10_000.0)}]}
    data = nested(sizes) | {"name": name, "positions": rotary, "experts": experts or None}
    made = replace(model_from_data(data), family=family)
    return next((preset for preset in PRESETS.values() if replace(made, name=preset.name) == preset), made)


def workload_of(found: Mapping[str, Any], model: Model) -> Workload:
    """Return the workload that fields describe."""
    names = {field.name for field in fields(Workload)}
    return Workload(model=model, **{name: value for name, value in found.items() if name in names and name != "model"})


def mesh_of(found: Mapping[str, Any]) -> MeshShape:
    """Return the mesh that a plan's fields describe, with degree 1 for axes without a field."""
    return MeshShape(**{axis: found.get(axis, 1) for axis in AXES})


def strategy_of(found: Mapping[str, Any], mesh: MeshShape) -> Strategy:
    """Return the strategy that a plan's fields describe. Fields without effect on this mesh have their default."""
    names = {field.name for field in fields(Strategy)}
    kept = {
        name: value
        for name, value in found.items()
        if name in names and (name not in _NEEDS or mesh.degree(_NEEDS[name]) > 1)
    }
    overlaps = {name: found[name] for name in OVERLAPS if name in found}
    return replace(DEFAULT, **kept | {"profile": replace(kept.get("profile", XLA), **overlaps)})
