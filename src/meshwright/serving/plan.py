"""`meshwright serve --plan`: read options of the server from the file of a serving plan."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

from meshwright.description.families.comparison import differences
from meshwright.description.step.model import ModelConfig
from meshwright.description.step.serve import page_parts
from meshwright.description.step.serving import NARROW
from meshwright.description.step.workload import Dtype
from meshwright.errors import MeshwrightError
from meshwright.planning.serving.plan import ServingPlan, read_serving_plan


def read_decode_plan(path: Path) -> ServingPlan:
    """Read a serving plan for decode; a plan for prefill alone is a `MeshwrightError`."""
    plan = read_serving_plan(path)
    if plan.serving.phase != "decode":
        raise MeshwrightError(
            f"{path} plans {plan.serving.phase}, and a server decodes too;"
            f" plan it with `meshwright plan … --serve decode -o FILE`"
        )
    return plan


def options_of_plan(plan: ServingPlan, path: Path, typed: Collection[str]) -> dict[str, Any]:
    """Return the options of `serve` that a plan sets, by name, without those on the command line.

    If the command line sets the mesh, the plan's cache split is left out too: it is for the plan's mesh.

    Args:
        plan: the plan.
        path: its file, for errors.
        typed: the names of the options on the command line.

    Raises:
        MeshwrightError: servers do not support a dtype of the plan, and the command line does not replace it.
    """
    serving = plan.serving
    options: dict[str, Any] = {
        "on": plan.system, "batch": plan.batch, "context": serving.context, "page_size": serving.page_size,
        "dtype": serving.compute_dtype,
    }  # fmt: skip
    if "mesh" not in typed:
        # The plan splits a page over devices; the engine counts the whole page.
        parts = page_parts(serving.model, plan.layout)
        options |= {"mesh": plan.mesh, "cache": plan.cache, "page_size": serving.page_size * parts}
    if "dtype" not in typed and serving.compute_dtype not in get_args(Dtype):
        raise MeshwrightError(
            f"{path} plans computation in {serving.compute_dtype}; a server computes in {' or '.join(get_args(Dtype))}:"
            f" add --dtype, or plan with it"
        )
    for name, what in (("weight_dtype", "weights"), ("kv_dtype", "keys and values")):
        value, narrow = getattr(serving, name), NARROW[name]
        if value in narrow:
            options[name] = value
        elif value != serving.compute_dtype and name not in typed:
            raise MeshwrightError(
                f"{path} plans {what} in {value}; a server stores them in the compute dtype,"
                f" {serving.compute_dtype}, or in {' or '.join(narrow)}: add --{name.replace('_', '-')} {narrow[0]}, or"
                f" plan with one of these"
            )
    if serving.model.lora is not None:
        options |= {"adapter_slots": serving.model.lora.slots, "adapter_rank": serving.model.lora.rank}
    return {name: value for name, value in options.items() if name not in typed}


def check_model(plan: ServingPlan, path: Path, model: ModelConfig, directory: Path) -> None:
    """Raise a `MeshwrightError` if a plan is for another model than `model`. Names of models are not compared.

    Args:
        plan: the plan.
        path: its file, for errors.
        model: the model to serve.
        directory: the directory of `model`, for errors.
    """
    planned = replace(plan.serving.model, lora=None)
    for name, (ours, theirs) in differences(planned, model).items():
        if name not in ("name", "family.name"):
            raise MeshwrightError(
                f"{path} is a plan of {planned.name}, with {name} {ours}; {directory} has {name} {theirs}"
            )
