"""The three modes of JAX, each as a function that carries out the steps of a way.

auto: einsums, and a constraint on what each step leaves; the partitioner finds the collectives. explicit: shardings in
types; each step leaves a value of its type. manual: the program of one device, every collective called by name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from meshwright.errors import MeshwrightError
from meshwright.notation import Communicate, Multiply, ShardedArray, Slice, Way
from meshwright.parallel.terms import Shape, product_of_terms, spec, spec_of_terms, sum_of_terms, term_dims

Mode = Literal["auto", "explicit", "manual"]
Operands = tuple[ShardedArray, ...]
Body = Callable[..., Array]
"""A function of the operands, each with the terms of its sum in dims of their own."""

MODES: tuple[Mode, ...] = ("auto", "explicit", "manual")


def automatic(operands: Operands, way: Way, mesh: Mesh) -> Body:
    """A way in auto mode; a result that is still a sum is left as its terms.

    Constraints have no word for such a sum. Without terms the partitioner would choose itself which devices take part
    in the einsum: for a reduce-scatter it may split the result first and permute (JAX 0.10.2).
    """

    def lay(value: Array, shape: Shape, lying: P) -> Array:
        return lax.with_sharding_constraint(value.reshape(shape), NamedSharding(mesh, lying))

    def constrained(value: Array, array: ShardedArray) -> Array:
        return lay(value, value.shape, spec_of_terms(array))

    def multiply(step: Multiply, left: Array, right: Array) -> Array:
        return constrained(product_of_terms(step, left, right, mesh.shape, lay), step.result)

    def move(step: Communicate | Slice, value: Array) -> Array:
        if isinstance(step, Slice):
            value = constrained(lax.optimization_barrier(value), step.operand)
        return constrained(sum_of_terms(step, value, mesh.shape, lay), step.result)

    return lambda *values: _carry_out(way, operands, values, multiply, move)


def explicit(operands: Operands, way: Way, mesh: Mesh) -> Body:
    """A way in explicit mode."""

    def lay(value: Array, shape: Shape, lying: P) -> Array:
        return lax.reshape(value, shape, out_sharding=lying)

    def added(terms: Array, array: ShardedArray) -> Array:
        return lax.reduce_sum(terms, term_dims(array), out_sharding=spec(array))

    def multiply(step: Multiply, left: Array, right: Array) -> Array:
        if not _has_sum_of_one(step):
            return jnp.einsum(step.formula, left, right, out_sharding=spec(step.result))
        return added(product_of_terms(step, left, right, mesh.shape, lay), step.result)

    def move(step: Communicate | Slice, value: Array) -> Array:
        return jax.reshard(_apart(step, value), spec(step.result))

    def body(*values: Array) -> Array:
        held = [added(terms, array) for terms, array in zip(values, operands, strict=True)]
        return _carry_out(way, operands, held, multiply, move)

    return body


def manual(operands: Operands, way: Way, mesh: Mesh) -> Body:
    """A way in manual mode."""

    def multiply(step: Multiply, left: Array, right: Array) -> Array:
        return jnp.einsum(step.formula, left, right)

    def move(step: Communicate | Slice, shard: Array) -> Array:
        return _cut(step, shard) if isinstance(step, Slice) else _communicate(step, shard)

    def body(*shards: Array) -> Array:
        held = [shard.squeeze(term_dims(array)) for shard, array in zip(shards, operands, strict=True)]
        return _carry_out(way, operands, held, multiply, move)

    specs = tuple(spec_of_terms(array) for array in operands)
    return jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=spec(way.result))


def _carry_out(
    way: Way,
    operands: Operands,
    values: Sequence[Array],
    multiply: Callable[[Multiply, Array, Array], Array],
    move: Callable[[Communicate | Slice, Array], Array],
) -> Array:
    """The result of the steps, each of which finds its operands by their labels."""
    held = {array.label: value for array, value in zip(operands, values, strict=True)}
    for step in way.steps:
        if isinstance(step, Multiply):
            left, right = (held.pop(operand.label) for operand in step.operands)
            held[step.result.label] = multiply(step, left, right)
        else:
            held[step.result.label] = move(step, held.pop(step.operand.label))
    (result,) = held.values()
    return result


def _apart(step: Communicate | Slice, value: Array) -> Array:
    """The value that a step begins with, where the step is a slice one that the compiler makes no single slice with.

    A reduce-scatter over Y and a slice over X would otherwise become an all-reduce and a slice over both (JAX 0.10.2).
    """
    return lax.optimization_barrier(value) if isinstance(step, Slice) else value


def _has_sum_of_one(step: Multiply) -> bool:
    """Whether mesh axes split a summed dim that only one operand has.

    Such a sum `jnp.einsum` takes before it multiplies, and cannot leave to take (JAX 0.10.2).
    """
    left, right = step.operands
    shared = {axis for dim in set(left.dims) & set(right.dims) for axis in left.axes_of(dim)}
    return not set(step.result.unreduced) <= shared


def _communicate(step: Communicate, shard: Array) -> Array:
    """A collective on the shard of one device."""
    source, target = step.source, step.target
    if step.kind == "all-reduce":
        return lax.psum(shard, step.axes)
    if step.kind == "all-gather" and source is not None:
        return lax.all_gather(shard, step.axes, axis=source, tiled=True, to="invarying")
    if step.kind == "reduce-scatter" and target is not None:
        return lax.psum_scatter(shard, step.axes, scatter_dimension=target, tiled=True)
    if step.kind == "all-to-all" and source is not None and target is not None:
        return lax.all_to_all(shard, step.axes, split_axis=target, concat_axis=source, tiled=True)
    raise MeshwrightError(f"{step} is no step of a product")


def _cut(step: Slice, shard: Array) -> Array:
    """The part of its shard that a device keeps."""
    size = shard.shape[step.target] // lax.axis_size(step.axes)
    return lax.dynamic_slice_in_dim(shard, lax.axis_index(step.axes) * size, size, step.target)
