"""Checks, before anything is compiled, that a workload can be split over a mesh and run.

Also that every option of a strategy can run, and has an effect, for a workload on a mesh.
"""

from __future__ import annotations

from functools import lru_cache

from meshwright.description.step.blocks import program
from meshwright.description.step.layer import Lookup
from meshwright.description.step.model import Model, ProgramModel
from meshwright.description.step.padding import check_padding, is_padded, padded
from meshwright.description.step.parameter_tree import Parameter, Tree, leaves, parameters
from meshwright.description.step.rules import RULES, Rules, check_rules, local_parameter_shape, rules_of
from meshwright.description.step.sequence import (
    attention_ops,
    check_sequence,
    has_attention,
    is_zigzag,
    least_length,
    num_parts,
)
from meshwright.description.step.stages import check_stages, counted_layers, most_stages
from meshwright.description.step.strategy import DEFAULT, Strategy
from meshwright.description.step.trained import LEAST_BLOCK, blocked_dim, stored_weight
from meshwright.description.step.workload import Workload
from meshwright.errors import MeshwrightError
from meshwright.mesh import AXES, MeshShape, check_batch, check_divides, multiples_around, nearest_divisors


def check_mesh(workload: Workload, mesh: MeshShape, rules: Rules = RULES) -> None:
    """Raise an error if the mesh cannot split a dim of the workload, or has an axis that splits nothing."""
    check_rules(rules)
    used = _used_axes(workload.model, rules)
    for axis, degree in mesh.degrees.items():
        if degree > 1 and axis not in used:
            raise MeshwrightError(
                f"mesh {mesh} has {axis}={degree}, which would split nothing of {workload.model.name};"
                f" use {axis}=1 (the axes that split something are {', '.join(sorted(used))})"
            )
    model, most = workload.model, most_stages(workload.model)
    if mesh.pp > 1 and reads_other_layers(model):
        raise MeshwrightError(
            f"mesh {mesh} has pp={mesh.pp}; layers of {model.name} read keys and values of earlier layers, or inputs of"
            f" their own, which no pipeline stage sends to the next: use pp=1 and more fsdp, tp or ep"
        )
    if mesh.pp > most:
        raise MeshwrightError(
            f"mesh {mesh} has pp={mesh.pp} stages for the {counted_layers(model, most)} of {model.name}, so that some"
            f" would split nothing; use {f'pp in 1 to {most}' if most > 1 else 'pp=1'}"
        )
    if workload.objective == "dpo" and mesh.pp > 1:
        raise MeshwrightError(
            f"mesh {mesh} has pp={mesh.pp}; the loss of dpo is of pairs of whole sequences, which no pipeline has yet:"
            f" use pp=1 and more fsdp or tp"
        )
    check_batch(mesh, batch=workload.batch, seq_len=workload.seq_len, batch_axes=rules["batch"])
    check_divides("batch", workload.batch, mesh, rules["batch"])
    check_divides("sequence length", workload.seq_len, mesh, rules["residual_sequence"])
    stored = parameters(padded(workload.model, mesh, rules))
    for path, parameter in leaves(stored):
        local_parameter_shape(parameter, mesh=mesh, rules=rules, what=path)
    if workload.quantize_base is not None:
        _check_quantised(workload, stored, mesh, rules)


def _check_quantised(workload: Workload, stored: Tree[Parameter], mesh: MeshShape, rules: Rules) -> None:
    """Raise if the values and scales of quantised weights cannot be split over a mesh.

    Quantised weights cannot have padded or copied heads; nf4 needs blocks of at least `LEAST_BLOCK` elements.

    stored: the declarations of the padded model's parameters.
    """
    base = workload.quantize_base
    declared = dict(leaves(parameters(workload.model)))
    for path, parameter in leaves(stored):
        if (own := workload.base_format(path, parameter)) is None:
            continue
        if parameter.shape != declared[path].shape:
            raise MeshwrightError(
                f"mesh {mesh} pads or copies the heads of {path}, which {base} does not yet; use tp that divides them"
            )
        if base == "nf4" and blocked_dim(parameter)[1] < LEAST_BLOCK:
            raise MeshwrightError(
                f"{path} is {list(parameter.shape)}: nf4 would have blocks of {blocked_dim(parameter)[1]}; use int8"
            )
        for array in stored_weight(parameter, own):
            local_parameter_shape(array.parameter, mesh=mesh, rules=rules, what=f"{path} in blocks of {base}")


def limits(workload: Workload, rules: Rules = RULES) -> frozenset[tuple[int, tuple[str, ...]]]:
    """Return the divisibility conditions of `check_mesh` as pairs (size, axes).

    A mesh is legal if the product of the axes' degrees divides the size in each pair. An axis that splits nothing is
    paired with size 1. The stages of pp, and dims that are padded, are left out: the caller checks `divides_padded`.
    """
    found = {(workload.batch, rules["batch"]), (workload.seq_len, rules["residual_sequence"])}
    for path, parameter in leaves(parameters(workload.model)):
        base = workload.base_format(path, parameter)
        for own in (parameter,) if base is None else (array.parameter for array in stored_weight(parameter, base)):
            dims = zip(own.axes, own.shape, strict=True)
            # Quantised heads are not padded.
            found.update((size, rules[name]) for name, size in dims if base or not is_padded(workload.model, name))
    found.update((1, (axis,)) for axis in AXES if axis not in _used_axes(workload.model, rules))
    if workload.objective == "dpo" or reads_other_layers(workload.model):
        found.add((1, ("pp",)))
    return frozenset((size, axes) for size, axes in found if axes)


def reads_other_layers(model: Model) -> bool:
    """Whether layers read more than the output of the layer before: keys of earlier layers, or inputs of their own."""
    found = program(model)
    return bool(found.layer_inputs) or any(stack.is_sharing for stack in found.stacks)


def _used_axes(model: Model, rules: Rules) -> set[str]:
    """Return the mesh axes that split a dim of a model or of its batch.

    ep is left out if the model has no experts, because it would then do the same as dp.
    """
    declared = {name for _, parameter in leaves(parameters(model)) for name in parameter.axes}
    named = declared | {"residual_sequence", "batch"}
    stages = set[str]() if isinstance(model, ProgramModel) and not model.has_stages else {"pp"}
    return {axis for name in named for axis in rules[name] if name != "batch" or axis != "ep"} | stages


def check_positions(model: Model, seq_len: int, use: str = "--seq-len {} or less") -> None:
    """Raise an error if a model has fewer learned positions than a sequence has tokens.

    Args:
        use: the advice at the end of the error, a format string that takes the number of positions.
    """
    most = learned_positions(model)
    if most is not None and seq_len > most:
        raise MeshwrightError(
            f"sequence length {seq_len} is more than the {most} positions that {model.name} has learned;"
            f" use {use.format(most)}"
        )


def learned_positions(model: Model) -> int | None:
    """Return the number of a model's learned positions, its longest sequence; None if positions are computed."""
    tables = (op for op in program(model).embedding if isinstance(op, Lookup) and op.is_positional)
    return min((op.rows[1] for op in tables), default=None)


def check_runnable(model: Model, mesh: MeshShape, strategy: Strategy = DEFAULT) -> None:
    """Raise an error if the model, the mesh or the strategy can be planned but not lowered, compiled or trained."""
    if reasons := _only_planned(model):
        raise MeshwrightError(
            f"model {model.name} has {' and '.join(reasons)}; it can be planned, and does not run yet"
        )
    _check_attention(model, mesh, strategy)
    if mesh.ep > 1 and model.experts is None:
        raise MeshwrightError(f"mesh {mesh} splits experts, of which {model.name} has none; use ep=1")
    if mesh.ep > 1 and mesh.tp > 1 and strategy.tp_stream == "whole":
        raise MeshwrightError(
            f"experts on mesh {mesh} with tp_stream='whole' can be planned, but what runs sends them tokens that are"
            f" split over tp; use ep=1, tp=1 or tp_stream='split'"
        )
    check_stages(model, mesh, strategy)
    check_sequence(model, mesh, strategy)
    _check_rings(model, strategy)
    check_padding(model, mesh, rules_of(strategy), strategy)
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


@lru_cache(maxsize=1 << 6)
def _only_planned(model: Model) -> tuple[str, ...]:
    """Return the features of a model that cannot run here."""
    has_alibi = any(op.has_alibi for op in attention_ops(model))
    return (*model.planned_only, *(("positions='alibi'",) if has_alibi else ()))


def _check_attention(model: Model, mesh: MeshShape, strategy: Strategy) -> None:
    """Raise an error if the strategy's fused attention lacks a feature of the model."""
    if strategy.attention == "scores":
        return
    for op in attention_ops(model):
        if strategy.attention == "cudnn" and op.qk_dim < op.value_dim:
            raise MeshwrightError(
                f"model {model.name} has queries of {op.qk_dim} dims and values of {op.value_dim}, but"
                f" attention='cudnn' takes no values wider than queries; use attention='flash' or 'scores'"
            )
        if strategy.attention == "cudnn" and op.is_chunked:
            raise MeshwrightError(
                f"model {model.name} attends within chunks of a sequence, which attention='cudnn' does not have; use"
                f" attention='flash' or 'scores'"
            )
        if op.softcap:
            raise MeshwrightError(
                f"model {model.name} has attention_softcap={op.softcap:g}, which attention={strategy.attention!r} does"
                f" not have; use attention='scores'"
            )
        if op.has_sinks:
            raise MeshwrightError(
                f"model {model.name} has attention sinks, which attention={strategy.attention!r} does not have;"
                f" use attention='scores'"
            )
    if mesh.pp > 1 and mesh.sp > 1 and any(len(op.windows) > 1 for op in attention_ops(model)):
        raise MeshwrightError(
            f"the layers of {model.name} differ in their windows: with attention={strategy.attention!r}, stages of"
            f" pp={mesh.pp} run different branches, which cannot communicate over sp={mesh.sp}; use"
            f" attention='scores', sp=1 or pp=1"
        )


def _check_rings(model: Model, strategy: Strategy) -> None:
    """Raise an error if the strategy's overlap of matmuls with collectives over tp cannot run."""
    if strategy.collective_matmul and any(op.latent for op in attention_ops(model)):
        raise MeshwrightError(
            f"collective_matmul with the latent attention of {model.name} can be planned, but what runs gathers the"
            f" stream for latents at once; use collective_matmul=False"
        )
    if strategy.collective_matmul and not isinstance(model, ProgramModel) and model.parallel_blocks == "shared norm":
        raise MeshwrightError(
            f"collective_matmul with the parallel blocks of {model.name} can be planned, but what runs gathers the"
            f" stream once for attention and MLP; use collective_matmul=False"
        )
    if strategy.collective_matmul and strategy.tp_stream == "whole":
        raise MeshwrightError(
            "collective_matmul with tp_stream='whole' can be planned, but what runs has rings of gathers and scatters"
            " of a stream that is split over tp; use tp_stream='split', or collective_matmul=False"
        )


def check_strategy(workload: Workload, mesh: MeshShape, strategy: Strategy) -> None:
    """Raise an error if an option of a strategy would have no effect, or cannot run with a workload on a mesh."""
    # A framework fixes its fields whether they have an effect on the mesh or not.
    unused = {} if strategy.profile.name else unused_options(workload, mesh, strategy)
    for field, reason in unused.items():
        value, default = getattr(strategy, field), getattr(DEFAULT, field)
        shown = f"'{value}'" if isinstance(value, MeshShape) else repr(value)
        raise MeshwrightError(f"{field}={shown} would have no effect on mesh {mesh}: {reason}; use {field}={default!r}")
    if workload.remat == "named" and not strategy.profile.saved_values:
        raise MeshwrightError("remat named saves what a framework's profile names, and none does; use another policy")
    parts, axes = strategy.num_microbatches, tuple(axis for axis in RULES["batch"] if axis != "ep" or mesh.ep > 1)
    each = workload.batch // mesh.degree(axes)
    if each % parts:
        nearest = " or ".join(str(legal) for legal in nearest_divisors(each, parts))
        raise MeshwrightError(
            f"num_microbatches={parts} cannot cut a device's share of the batch, {workload.batch} over"
            f" {'*'.join(axes)}={mesh.degree(axes)}: {each} % {parts} = {each % parts}; use num_microbatches={nearest}"
        )
    check_sequence(workload.model, mesh, strategy)
    if workload.packed and strategy.attention == "cudnn":
        raise MeshwrightError(
            "attention='cudnn' takes one document a row, and packed rows have several; use attention='flash', or"
            " 'scores'"
        )
    seq_len, cuts = workload.seq_len, num_parts(mesh, strategy)
    if is_zigzag(mesh, strategy) and has_attention(workload.model) and seq_len % cuts:
        nearest = " or ".join(str(length) for length in multiples_around(seq_len, cuts))
        raise MeshwrightError(
            f"sequence length {seq_len} cannot be cut into {cuts} parts, two for each of sp={mesh.sp}, as a ring"
            f" in zigzag order needs: {seq_len} % {cuts} = {seq_len % cuts}; use {nearest}"
        )
    if seq_len < (least := least_length(workload.model, cuts)):
        raise MeshwrightError(
            f"sequence length {seq_len} has {seq_len / cuts:g} tokens in each of {cuts} parts over sp={mesh.sp}, fewer"
            f" than the {least // cuts} that a convolution of {workload.model.name} reads; use {least} or more, or"
            f" less sp"
        )


def unused_options(workload: Workload, mesh: MeshShape, strategy: Strategy) -> dict[str, str]:
    """Return, by field of the strategy, why its value has no effect on the mesh although it differs from the default.

    Fields of the framework profile are not checked.
    """
    stored = RULES["embed"]
    idle = (
        ("zero_stage", mesh.degree(stored) == 1, f"{'*'.join(stored)}=1 stores no parameter in shards"),
        ("schedule", mesh.pp == 1, "pp=1 has no stages"),
        ("virtual_stages", mesh.pp == 1, "pp=1 has no stages"),
        ("tp_stream", mesh.tp == 1, "tp=1 splits no stream"),
        ("collective_matmul", mesh.tp == 1, "tp=1 has no collectives"),
        ("sp_method", mesh.sp == 1, "sp=1 splits no sequence"),
        ("moment_dtype", strategy.optimizer == "sgd", "sgd keeps no moments"),
        ("gradient_dtype", strategy.gradient_dtype == workload.compute_dtype, "matmuls have this dtype"),
        ("master_weights", workload.param_dtype == "f32", "parameters are float32 themselves"),
        ("reference_mesh", not has_reference(workload), "no step runs a reference (objective='dpo', reference='live')"),
    )
    return {
        field: why for field, is_idle, why in idle if is_idle and getattr(strategy, field) != getattr(DEFAULT, field)
    }


def has_reference(workload: Workload) -> bool:
    """Whether a step runs a frozen reference model (DPO with a live reference)."""
    return workload.objective == "dpo" and workload.reference == "live"


def check_precision(mesh: MeshShape, strategy: Strategy) -> None:
    """Raise an error if a strategy's precision can be planned but not run."""
    if strategy.optimizer == "adamw-8bit":
        raise MeshwrightError("optimizer adamw-8bit can be planned but not run; use adamw with bf16 moments")
    if strategy.matmul_dtype and mesh.tp > 1 and strategy.collective_matmul:
        raise MeshwrightError(
            f"matmuls in {strategy.matmul_dtype} can be planned, but cannot run as matmuls"
            f" overlapped over tp={mesh.tp}; use collective_matmul=False"
        )
