"""Whether a workload can be split over a mesh and whether this version can run it, before anything is compiled."""

from __future__ import annotations

from dataclasses import fields

from meshwright.errors import MeshwrightError
from meshwright.mesh import AXES, MeshShape, check_batch, check_divides
from meshwright.step.parameters import leaves, parameters
from meshwright.workload.config import ModelConfig
from meshwright.workload.precision import check_precision
from meshwright.workload.rules import RULES, Rules, check_rules, local_parameter_shape
from meshwright.workload.sequence import check_sequence
from meshwright.workload.stages import check_stages
from meshwright.workload.strategy import DEFAULT, Strategy
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
    "experts",
)
"""What may differ between the models that the decoder runs; all else has to be as Llama has it."""


def check_mesh(workload: Workload, mesh: MeshShape, rules: Rules = RULES) -> None:
    """Raise where the mesh cannot split some dim of the workload, or an axis of it would split nothing."""
    check_rules(rules)
    used = _used_axes(workload.model, rules)
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
    for path, parameter in leaves(parameters(workload.model)):
        local_parameter_shape(parameter, mesh=mesh, rules=rules, what=path)


def limits(workload: Workload, rules: Rules = RULES) -> frozenset[tuple[int, tuple[str, ...]]]:
    """Every size that a mesh must divide, with the axes that split it: what `check_mesh` checks but for pp's stages.

    A mesh is legal where the product of the degrees of the axes divides the size, for each pair; an axis that would
    split nothing stands with size 1.
    """
    found = {(workload.batch, rules["batch"]), (workload.seq_len, rules["residual_sequence"])}
    for _, parameter in leaves(parameters(workload.model)):
        found.update((size, rules[name]) for name, size in zip(parameter.axes, parameter.shape, strict=True))
    found.update((1, (axis,)) for axis in AXES if axis not in _used_axes(workload.model, rules))
    return frozenset((size, axes) for size, axes in found if axes)


def _used_axes(model: ModelConfig, rules: Rules) -> set[str]:
    """The mesh axes that split something of a model or its batch.

    Experts give ep its dim; the batch alone would make it another name for dp.
    """
    declared = {name for _, parameter in leaves(parameters(model)) for name in parameter.axes}
    named = declared | {"residual_sequence", "batch"}
    return {axis for name in named for axis in rules[name] if name != "batch" or axis != "ep"} | {"pp"}


def check_positions(model: ModelConfig, seq_len: int) -> None:
    """Raise where a model with learned positions has fewer of them than a sequence has tokens."""
    if model.positions == "learned" and seq_len > model.max_positions:
        raise MeshwrightError(
            f"sequence length {seq_len} is more than the {model.max_positions} positions that {model.name} has learned;"
            f" use --seq-len {model.max_positions} or less"
        )


def check_runnable(model: ModelConfig, mesh: MeshShape, strategy: Strategy = DEFAULT) -> None:
    """Raise where a step would compute a model otherwise than it is, or otherwise than the mesh and strategy say.

    Such a model, mesh or strategy can be planned, not lowered, compiled or trained.
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
            f" Llama-style decoder: gated silu, RMSNorm, rotary positions, no biases, full attention"
        )
    _check_experts(model, mesh, strategy)
    check_stages(model, mesh, strategy)
    check_sequence(model, mesh, strategy)
    _check_rings(strategy)
    if strategy.zero_stage in (1, 2) and model.experts:
        raise MeshwrightError(
            f"ZeRO-{strategy.zero_stage} can be planned, but what runs has it without experts yet; use zero_stage 3"
            f" or 0"
        )
    if strategy.zero_stage == 2 and mesh.pp > 1:
        raise MeshwrightError(
            f"ZeRO-2 on pp={mesh.pp} stages can be planned, but in what runs a stage adds up the gradients of all its"
            f" microbatches before they are scattered, which is ZeRO-1; use zero_stage 1, or 3"
        )
    check_precision(mesh, strategy)


def _check_rings(strategy: Strategy) -> None:
    """Raise where products do not overlap with their collectives over tp as a strategy says."""
    if strategy.overlaps_tp and not strategy.sequence_parallel:
        raise MeshwrightError(
            "overlaps_tp without sequence_parallel can be planned, but what runs has rings of gathers and scatters of a"
            " stream that is split over tp; use both, or neither"
        )


def _check_experts(model: ModelConfig, mesh: MeshShape, strategy: Strategy) -> None:
    """Raise where experts do not run as a mesh and a strategy say, or a mesh would split what there is none of."""
    if mesh.ep > 1 and model.experts is None:
        raise MeshwrightError(f"mesh {mesh} splits experts, of which {model.name} has none; use ep=1")
    if mesh.ep > 1 and mesh.tp > 1 and not strategy.sequence_parallel:
        raise MeshwrightError(
            f"experts on mesh {mesh} without sequence_parallel can be planned, but what runs sends them tokens that"
            f" are split over tp; use ep=1, tp=1 or sequence_parallel"
        )
