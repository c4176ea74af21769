"""`meshwright serve --plan`: what a server takes from the file of a serving plan."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args

from meshwright.errors import MeshwrightError
from meshwright.planner import ServingPlan, read_serving_plan
from meshwright.step import Dtype, ModelConfig
from meshwright.step.serve import page_parts


def read_plan_to_serve(path: Path) -> ServingPlan:
    """The plan in a file, of decoding."""
    plan = read_serving_plan(path)
    if plan.serving.phase != "decode":
        raise MeshwrightError(
            f"{path} plans {plan.serving.phase}, and a server makes tokens too;"
            f" `meshwright plan … --serve decode -o FILE` plans these"
        )
    return plan


def planned_options(plan: ServingPlan, path: Path, typed: Collection[str]) -> dict[str, Any]:
    """The options of `serve` that a plan says, those that are typed left out.

    A typed mesh is laid without the plan's split of the cache, which is one of the plan's mesh.

    Raises:
        MeshwrightError: a dtype of the plan that no server runs in, and that no option replaces.
    """
    serving = plan.serving
    found: dict[str, Any] = {
        "on": plan.system, "rows": plan.batch, "context": serving.context, "page_size": serving.page_size,
        "dtype": serving.compute_dtype,
    }  # fmt: skip
    if "mesh" not in typed:
        # A page of the engine is all of what its parts have on their devices.
        parts = page_parts(serving.model, plan.layout)
        found |= {"mesh": plan.mesh, "cache": plan.cache, "page_size": serving.page_size * parts}
    if "dtype" not in typed and serving.compute_dtype not in get_args(Dtype):
        raise MeshwrightError(
            f"{path} plans products in {serving.compute_dtype}; a server computes in {' or '.join(get_args(Dtype))}:"
            f" add --dtype, or plan with it"
        )
    for name, what in (("weight_dtype", "weights"), ("kv_dtype", "keys and values")):
        value = getattr(serving, name)
        if value == "int8":
            found[name] = value
        elif value != serving.compute_dtype and name not in typed:
            raise MeshwrightError(
                f"{path} plans {what} in {value}; a server keeps them in the dtype of products,"
                f" {serving.compute_dtype}, or in int8: add --{name.replace('_', '-')} int8, or plan with one of these"
            )
    return {name: value for name, value in found.items() if name not in typed}


def check_model(plan: ServingPlan, path: Path, model: ModelConfig, directory: Path) -> None:
    """Raise where a plan is of another model than a directory's; names are not compared."""
    planned = plan.serving.model
    other = [
        field.name
        for field in fields(ModelConfig)
        if field.name not in ("name", "family") and getattr(planned, field.name) != getattr(model, field.name)
    ]
    if other:
        name = other[0]
        raise MeshwrightError(
            f"{path} is a plan of {planned.name}, with {name} {getattr(planned, name)}; {directory} has {name}"
            f" {getattr(model, name)}"
        )
