"""Whether a workload can be split over a mesh and whether this version can run it, before anything is compiled."""

from __future__ import annotations

from dataclasses import fields

from meshwright.errors import MeshwrightError
from meshwright.mesh import POSITIONAL, MeshShape, check_batch, check_divides
from meshwright.workload.config import ModelConfig
from meshwright.workload.parameters import leaves, parameters
from meshwright.workload.rules import RULES, Rules, local_parameter_shape
from meshwright.workload.workload import Workload

RUNNABLE_SIZES = (
    "name",
    "num_layers",
    "embed",
    "mlp",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "vocab",
    "tied_embeddings",
    "rope_theta",
    "rope_scaling",
    "norm_epsilon",
)
"""What may differ between the models that the decoder runs; all else has to be as Llama has it."""


def check_mesh(workload: Workload, mesh: MeshShape, rules: Rules = RULES) -> None:
    """Raise where the mesh cannot split some dim of the workload, or an axis of it would split nothing."""
    declared = list(leaves(parameters(workload.model)))
    named = {name for _, parameter in declared for name in parameter.axes} | {"residual_sequence", "batch"}
    # Experts give ep its dim; the batch alone would make it another name for dp.
    used = {axis for name in named for axis in rules[name] if name != "batch" or axis != "ep"} | {"pp"}
    for axis, degree in mesh.degrees.items():
        if degree > 1 and axis not in used:
            raise MeshwrightError(
                f"mesh {mesh} has {axis}={degree}, which would split nothing of {workload.model.name};"
                f" use {axis}=1 (the axes that split something are {', '.join(sorted(used))})"
            )
    if mesh.pp > workload.model.num_layers:
        raise MeshwrightError(
            f"mesh {mesh} has pp={mesh.pp} stages for the {workload.model.num_layers} layers of"
            f" {workload.model.name}, so that some would split nothing; use pp in 1 to {workload.model.num_layers}"
        )
    check_batch(mesh, batch=workload.batch, seq_len=workload.seq_len)
    check_divides("batch", workload.batch, mesh, rules["batch"])
    check_divides("sequence length", workload.seq_len, mesh, rules["residual_sequence"])
    for path, parameter in declared:
        local_parameter_shape(parameter, mesh=mesh, rules=rules, what=path)


def check_runnable(model: ModelConfig, mesh: MeshShape) -> None:
    """Raise where a step would compute a model otherwise than it is, or would not use an axis of the mesh.

    Such a model or mesh can be planned, not lowered, compiled or trained.
    """
    differing = [
        f"{field.name}={getattr(model, field.name)!r}"
        for field in fields(model)
        if field.name not in RUNNABLE_SIZES and getattr(model, field.name) != field.default
    ]
    if differing:
        more = f" and {len(differing) - 3} more such" if len(differing) > 3 else ""
        raise MeshwrightError(
            f"model {model.name} has {', '.join(differing[:3])}{more}; it can be planned, but what runs is a"
            f" Llama-style decoder: gated silu, RMSNorm, rotary positions, no biases, no experts, full attention"
        )
    if unused := [axis for axis, degree in mesh.degrees.items() if degree > 1 and axis not in POSITIONAL]:
        raise MeshwrightError(
            f"mesh {mesh} can be planned, but what runs does not split over {' and '.join(unused)} yet;"
            f" use {' and '.join(f'{axis}=1' for axis in unused)}"
        )
