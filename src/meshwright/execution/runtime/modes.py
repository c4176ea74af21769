"""JAX's modes of parallelism: for each mode, a function that returns a sharded matmul in this mode.

- auto: each result has a sharding constraint, and XLA's partitioner chooses the collectives.
- explicit: shardings are part of types, and each communication step is a reshard.
- manual: a per-device program under `jax.shard_map`, which calls each collective.
- overlapped: like manual, with collective matmuls where possible.

The matmul is given as an `Implementation`, a sequence of steps: matmuls, collectives and local slices.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from meshwright.description.notation.array import ShardedArray
from meshwright.description.notation.steps import Implementation, LocalSlice, Multiply, Step
from meshwright.errors import MeshwrightError
from meshwright.execution.runtime.collective_matmul import all_gather_matmul, matmul_reduce_scatter
from meshwright.execution.runtime.fuse_matmuls import CollectiveMatmul, FusedStep, fuse_collective_matmuls
from meshwright.execution.runtime.terms import Shape, product_of_terms, spec, spec_of_terms, sum_of_terms, term_dims

Mode = Literal["auto", "explicit", "manual", "overlapped"]
Operands = tuple[ShardedArray, ...]
Body = Callable[..., Array]
"""A function from the operands to the result. Unreduced operands are stored as partial sums, see `terms`."""

MODES: tuple[Mode, ...] = ("auto", "explicit", "manual", "overlapped")


def automatic(operands: Operands, implementation: Implementation, mesh: Mesh) -> Body:
    """Return a function that computes the matmul in auto mode.

    It returns an unreduced result as partial sums along leading dims (`terms`).

    Sharding constraints cannot express an unreduced result. Without these leading dims, the partitioner may choose
    another einsum: for a reduce-scatter it may split the result first and permute (JAX 0.10.2).
    """

    def reshape_to(value: Array, shape: Shape, target: P) -> Array:
        return lax.with_sharding_constraint(value.reshape(shape), NamedSharding(mesh, target))

    def constrained(value: Array, array: ShardedArray) -> Array:
        return reshape_to(value, value.shape, spec_of_terms(array))

    def do(step: Step, *values: Array) -> Array:
        if isinstance(step, Multiply):
            return constrained(product_of_terms(step, *values, degrees=mesh.shape, reshape_to=reshape_to), step.result)
        (value,) = values
        if isinstance(step, LocalSlice):
            value = constrained(_prevent_slice_fusion(value), step.operand)
        return constrained(sum_of_terms(step, value, reshape_to=reshape_to), step.result)

    return lambda *values: _run_steps(implementation.steps, operands, values, do)


def explicit(operands: Operands, implementation: Implementation, mesh: Mesh) -> Body:
    """Return a function that computes the matmul with explicit axes: `out_sharding` states each result's sharding."""

    def reshape_to(value: Array, shape: Shape, target: P) -> Array:
        return lax.reshape(value, shape, out_sharding=target)

    def added(terms: Array, array: ShardedArray) -> Array:
        return lax.reduce_sum(terms, term_dims(array), out_sharding=spec(array))

    def do(step: Step, *values: Array) -> Array:
        if not isinstance(step, Multiply):
            (value,) = values
            return jax.reshard(
                _prevent_slice_fusion(value) if isinstance(step, LocalSlice) else value, spec(step.result)
            )
        # `jnp.einsum` sums a dim that only one operand has before it multiplies, and cannot leave the sum unreduced
        # (JAX 0.10.2).
        left, right = step.operands
        shared = {axis for dim in set(left.dims) & set(right.dims) for axis in left.axes_of(dim)}
        if not set(step.result.unreduced) <= shared:
            return added(product_of_terms(step, *values, degrees=mesh.shape, reshape_to=reshape_to), step.result)
        return jnp.einsum(step.formula, *values, out_sharding=spec(step.result))

    def body(*values: Array) -> Array:
        held = [added(terms, array) for terms, array in zip(values, operands, strict=True)]
        return _run_steps(implementation.steps, operands, held, do)

    return body


def manual(operands: Operands, implementation: Implementation, mesh: Mesh) -> Body:
    """Return a function that computes the matmul in manual mode."""
    return _per_device(implementation.steps, operands, implementation.result, mesh)


def overlapped(operands: Operands, implementation: Implementation, mesh: Mesh) -> Body:
    """Return a function that computes the matmul in manual mode, with collective matmuls where possible."""
    return _per_device(fuse_collective_matmuls(implementation.steps), operands, implementation.result, mesh)


def _per_device(steps: Sequence[FusedStep], operands: Operands, result: ShardedArray, mesh: Mesh) -> Body:
    """Return a function that runs the steps as a per-device program under `jax.shard_map`."""

    def body(*shards: Array) -> Array:
        held = [shard.squeeze(term_dims(array)) for shard, array in zip(shards, operands, strict=True)]
        made = _run_steps(steps, operands, held, _run_step_on_shards)
        return lax.pcast(made, result.unreduced, to="unreduced")

    specs = tuple(spec_of_terms(array) for array in operands)
    return jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=spec(result))


def _run_steps(
    steps: Sequence[FusedStep], operands: Operands, values: Sequence[Array], do: Callable[..., Array]
) -> Array:
    """Run the steps in order and return the last result. do: runs one step on the values of its operands."""
    held = {array.label: value for array, value in zip(operands, values, strict=True)}
    for step in steps:
        read = step.operands if isinstance(step, Multiply | CollectiveMatmul) else (step.operand,)
        held[step.result.label] = do(step, *(held.pop(array.label) for array in read))
    (result,) = held.values()
    return result


def _prevent_slice_fusion(value: Array) -> Array:
    """Return the value, with a barrier that keeps XLA from fusing a slice of it with the reduce-scatter before it.

    XLA would make both one all-reduce (JAX 0.10.2).
    """
    return lax.optimization_barrier(value)


def _run_step_on_shards(step: FusedStep, *shards: Array) -> Array:
    if isinstance(step, Multiply):
        return jnp.einsum(step.formula, *shards)
    if isinstance(step, CollectiveMatmul):
        return _overlap(step, *shards)
    (shard,) = shards
    if isinstance(step, LocalSlice):
        size = shard.shape[step.target] // lax.axis_size(step.axes)
        return lax.dynamic_slice_in_dim(shard, lax.axis_index(step.axes) * size, size, step.target)
    source, target = step.source, step.target
    if step.kind == "all-reduce":
        return lax.psum(shard, step.axes)
    if step.kind == "all-gather" and source is not None:
        return lax.all_gather(shard, step.axes, axis=source, tiled=True, to="invarying")
    if step.kind == "reduce-scatter" and target is not None:
        return lax.psum_scatter(shard, step.axes, scatter_dimension=target, tiled=True)
    if step.kind == "all-to-all" and source is not None and target is not None:
        return lax.all_to_all(shard, step.axes, split_axis=target, concat_axis=source, tiled=True)
    raise MeshwrightError(f"{step} is not a step of a matmul")


def _overlap(step: CollectiveMatmul, left: Array, right: Array) -> Array:
    axes, letter = step.collective.axes, step.letter
    if not step.is_gather:
        return matmul_reduce_scatter(step.formula, left, right, axes=axes, dim=letter)
    if step.collective.operand == step.operands[1]:
        left, right = right, left
    return all_gather_matmul(step.formula, left, right, axes=axes, dim=letter)
