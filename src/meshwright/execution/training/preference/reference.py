"""The frozen reference model of preference tuning: its forward pass, on a mesh of its own, and its parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax import Array
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from meshwright.description.families.registry import workload_from_data
from meshwright.description.step.padding import padded
from meshwright.description.step.parameter_tree import leaves, map_leaves, parameters
from meshwright.description.step.reference import ReferencePass, check_reference, reference_pass
from meshwright.description.step.rules import rules_of
from meshwright.description.step.strategy import strategy_from_data
from meshwright.description.step.trained import BaseFormat, can_be_quantised
from meshwright.errors import MeshwrightError
from meshwright.execution.models.decoder import log_probabilities_and_load
from meshwright.execution.models.pipelined import microbatches
from meshwright.execution.models.quantised.weights import abstract_quantised
from meshwright.execution.runtime.arrays import DTYPES, abstract
from meshwright.execution.runtime.sharding_context import ShardingContext
from meshwright.execution.training.compiler import compiler_options
from meshwright.execution.training.slots import in_order, to_order, to_stage_layout
from meshwright.execution.training.step import abstract_batch
from meshwright.mesh import MeshShape


def reference_step(reference: ReferencePass) -> Callable[..., Array]:
    """Return the jitted forward pass of the reference: (params, batch) -> log-probability [b] of each row.

    `params` are those of `abstract_reference`. `batch` has `tokens`, `targets` and `weights` [b, s], and `positions` if
    the mesh reorders tokens. Call under `jax.set_mesh`.
    """
    layout, count = ShardingContext(reference.mesh, rules_of(reference.strategy)), reference.strategy.num_microbatches

    def part(params: Any, batch: Mapping[str, Array]) -> Array:
        log_probabilities, _ = log_probabilities_and_load(
            params, batch, reference.workload.config, layout, dtype=DTYPES[reference.workload.compute_dtype],
            remat="none", strategy=reference.strategy,
        )  # fmt: skip
        return log_probabilities

    def run(params: Any, batch: Mapping[str, Array]) -> Array:
        if count == 1:
            return part(params, batch)
        # Without the barrier XLA gathers the weights once for all microbatches, and keeps them whole.
        each = lambda batch: part(*jax.lax.optimization_barrier((params, batch)))  # noqa: E731
        batches = {name: microbatches(array, count, layout, group_size=2) for name, array in batch.items()}
        # The results of m microbatches [m, b / m] as one array [b], in the order of the batch.
        parts = jax.lax.map(each, batches)
        size, split = parts.shape[1], layout.spec("batch")[0]
        pairs = jax.lax.reshape(parts, (count, size // 2, 2), out_sharding=P(None, split, None))
        return jax.lax.reshape(jax.numpy.moveaxis(pairs, 0, 1), (count * size,), out_sharding=P(split))

    return jax.jit(run, compiler_options=compiler_options())


def abstract_reference(
    reference: ReferencePass, mesh: Mesh, *, is_saved: bool = False, base: BaseFormat | None = None
) -> Any:
    """Return the parameters of a reference as shapes, dtypes and shardings: sharded weights in the compute dtype.

    Norm scales and biases, which are used in float32, have the policy's parameter dtype, so that a reference computes
    the same as a policy with equal parameters.

    Args:
        is_saved: return the parameters as they are stored in files, without padding.
        base: the format of the policy's quantised weights, if the reference reads these; else None.
    """
    layout, read = ShardingContext(reference.mesh, rules_of(reference.strategy)), reference.workload
    if is_saved:
        layout = in_order(layout, read.config, reference.strategy)
    declared = parameters(padded(read.config, layout.mesh, layout.rules))
    vectors = {path for path, parameter in leaves(declared) if parameter.role == "vector"}
    params = abstract(declared, mesh, layout, read.compute_dtype)
    by_path = dict(leaves(declared))

    def stored(path: str, leaf: jax.ShapeDtypeStruct) -> Any:
        if base is not None and can_be_quantised(by_path[path]):
            return abstract_quantised(by_path[path], base, mesh, layout)
        return leaf.update(dtype=DTYPES[read.param_dtype]) if path in vectors else leaf

    return map_leaves(stored, params)


def to_reference(params: Any, reference: ReferencePass, mesh: Mesh) -> Any:
    """Convert parameters as files store them to those of `abstract_reference`. Call under `jax.set_mesh`."""
    layout, model = ShardingContext(reference.mesh, rules_of(reference.strategy)), reference.workload.config
    if in_order(layout, model, reference.strategy) == layout:
        return params
    wanted = abstract_reference(reference, mesh)
    return jax.jit(lambda params: to_stage_layout(params, wanted, model, layout, reference.strategy))(params)


def to_saved(params: Any, reference: ReferencePass, mesh: Mesh) -> Any:
    """Convert parameters of `abstract_reference` to those that files store: the inverse of `to_reference`."""
    layout, model = ShardingContext(reference.mesh, rules_of(reference.strategy)), reference.workload.config
    if in_order(layout, model, reference.strategy) == layout:
        return params
    wanted = abstract_reference(reference, mesh, is_saved=True)
    return jax.jit(lambda params: to_order(params, wanted, model, layout, reference.strategy))(params)


def lower_reference_step(mesh: Mesh, *, workload: dict[str, Any], strategy: dict[str, Any]) -> jax.stages.Lowered:
    """Lower the forward pass of the reference for its mesh, whose devices need not be present.

    `workload` and `strategy` are the policy's, as `dataclasses.asdict` writes them; the mesh is the reference's.

    Raises:
        MeshwrightError: the step runs no reference model.
    """
    read, way = workload_from_data(workload), strategy_from_data(strategy)
    shape = MeshShape(**mesh.shape)
    check_reference(read, way.reference_mesh or shape, way, runs=True)
    if (reference := reference_pass(read, way.reference_mesh or shape, way)) is None:
        raise MeshwrightError("this step runs no reference")
    with jax.set_mesh(mesh):
        params = abstract_reference(reference, mesh, base=read.quantize_base)
        return reference_step(reference).lower(params, text_batch(reference, mesh))


def text_batch(reference: ReferencePass, mesh: Mesh) -> dict[str, jax.ShapeDtypeStruct]:
    """Return the arrays of the reference's batch, {name: shape, dtype and sharding}; see `reference_step`."""
    layout = ShardingContext(reference.mesh, rules_of(reference.strategy))
    batch = abstract_batch(reference.workload, layout, mesh, reference.strategy)
    return {name: batch[name] for name in ("tokens", "targets", "weights", "positions") if name in batch}
