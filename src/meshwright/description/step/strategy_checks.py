"""Checks that every option of a strategy can run, and has an effect, for a workload on a mesh."""

from __future__ import annotations

from meshwright.description.step.rules import RULES
from meshwright.description.step.sequence import check_sequence, has_attention, is_zigzag
from meshwright.description.step.strategy import DEFAULT, Strategy
from meshwright.description.step.workload import Workload
from meshwright.errors import MeshwrightError
from meshwright.mesh import MeshShape, multiples_around, nearest_divisors


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
    if workload.quantize_base is not None and strategy.zero_stage in (1, 2):
        raise MeshwrightError(
            f"zero_stage={strategy.zero_stage} gathers all weights once a step, and {workload.quantize_base} would be"
            " nothing less then; use zero_stage=3"
        )
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
    if is_zigzag(mesh, strategy) and has_attention(workload.model):
        seq_len = workload.seq_len
        parts = 2 * mesh.sp
        if seq_len % parts:
            nearest = " or ".join(str(length) for length in multiples_around(seq_len, parts))
            raise MeshwrightError(
                f"sequence length {seq_len} cannot be cut into {parts} parts, two for each of sp={mesh.sp}, as a ring"
                f" in zigzag order needs: {seq_len} % {parts} = {seq_len % parts}; use {nearest}"
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
