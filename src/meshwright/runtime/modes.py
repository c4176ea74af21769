"""The modes of JAX, each as a function that carries out the steps of a way.

auto: einsums, and a constraint on what each step leaves; the partitioner finds the collectives. explicit: shardings in
types; each step leaves a value of its type. manual: the program of one device, every collective called by name.
overlapped: as manual, with collective matmul for each product that has a collective to overlap with.
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
from meshwright.notation import Communicate, Multiply, ShardedArray, Slice, Step, Way
from meshwright.runtime.overlapped import gather_product, product_scatter
from meshwright.runtime.pairing import Overlap, PairedStep, paired
from meshwright.runtime.terms import Shape, product_of_terms, spec, spec_of_terms, sum_of_terms, term_dims

Mode = Literal["auto", "explicit", "manual", "overlapped"]
Operands = tuple[ShardedArray, ...]
Body = Callable[..., Array]
"""A function of the operands, each with the terms of its sum in dims of their own."""

MODES: tuple[Mode, ...] = ("auto", "explicit", "manual", "overlapped")


def automatic(operands: Operands, way: Way, mesh: Mesh) -> Body:
    """A way in auto mode; a result that is still a sum is left as its terms.

    Constraints have no word for such a sum. Without terms the partitioner would choose itself which devices take part
    in the einsum: for a reduce-scatter it may split the result first and permute (JAX 0.10.2).
    """

    def lay(value: Array, shape: Shape, lying: P) -> Array:
        return lax.with_sharding_constraint(value.reshape(shape), NamedSharding(mesh, lying))

    def constrained(value: Array, array: ShardedArray) -> Array:
        return lay(value, value.shape, spec_of_terms(array))

    def do(step: Step, *values: Array) -> Array:
        if isinstance(step, Multiply):
            return constrained(product_of_terms(step, *values, degrees=mesh.shape, lay=lay), step.result)
        (value,) = values
        if isinstance(step, Slice):
            value = constrained(_held_back(value), step.operand)
        return constrained(sum_of_terms(step, value, lay=lay), step.result)

    return lambda *values: _carry_out(way.steps, operands, values, do)


def explicit(operands: Operands, way: Way, mesh: Mesh) -> Body:
    """A way in explicit mode."""

    def lay(value: Array, shape: Shape, lying: P) -> Array:
        return lax.reshape(value, shape, out_sharding=lying)

    def added(terms: Array, array: ShardedArray) -> Array:
        return lax.reduce_sum(terms, term_dims(array), out_sharding=spec(array))

    def do(step: Step, *values: Array) -> Array:
        if not isinstance(step, Multiply):
            (value,) = values
            return jax.reshard(_held_back(value) if isinstance(step, Slice) else value, spec(step.result))
        if _sums_one_alone(step):
            return added(product_of_terms(step, *values, degrees=mesh.shape, lay=lay), step.result)
        return jnp.einsum(step.formula, *values, out_sharding=spec(step.result))

    def body(*values: Array) -> Array:
        held = [added(terms, array) for terms, array in zip(values, operands, strict=True)]
        return _carry_out(way.steps, operands, held, do)

    return body


def manual(operands: Operands, way: Way, mesh: Mesh) -> Body:
    """A way in manual mode."""
    return _per_device(way.steps, operands, way.result, mesh)


def overlapped(operands: Operands, way: Way, mesh: Mesh) -> Body:
    """A way in manual mode, its products overlapping with their collectives where they can."""
    return _per_device(paired(way.steps), operands, way.result, mesh)


def _per_device(steps: Sequence[PairedStep], operands: Operands, result: ShardedArray, mesh: Mesh) -> Body:
    """The program of each device, whose values are shards."""

    def body(*shards: Array) -> Array:
        held = [shard.squeeze(term_dims(array)) for shard, array in zip(shards, operands, strict=True)]
        made = _carry_out(steps, operands, held, _do_locally)
        return lax.pcast(made, result.unreduced, to="unreduced")

    specs = tuple(spec_of_terms(array) for array in operands)
    return jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=spec(result))


def _carry_out(
    steps: Sequence[PairedStep], operands: Operands, values: Sequence[Array], do: Callable[..., Array]
) -> Array:
    """The result of the steps, each of which finds its operands by their labels."""
    held = {array.label: value for array, value in zip(operands, values, strict=True)}
    for step in steps:
        read = step.operands if isinstance(step, Multiply | Overlap) else (step.operand,)
        held[step.result.label] = do(step, *(held.pop(array.label) for array in read))
    (result,) = held.values()
    return result


def _held_back(value: Array) -> Array:
    """A value that the compiler may not slice before it is whole.

    It would make one slice of that of a reduce-scatter and of one that follows, and the reduce-scatter an all-reduce
    (JAX 0.10.2).
    """
    return lax.optimization_barrier(value)


def _sums_one_alone(step: Multiply) -> bool:
    """Whether mesh axes split a summed dim that only one operand has.

    Such a sum `jnp.einsum` takes before it multiplies, and cannot leave to take (JAX 0.10.2).
    """
    left, right = step.operands
    shared = {axis for dim in set(left.dims) & set(right.dims) for axis in left.axes_of(dim)}
    return not set(step.result.unreduced) <= shared


def _do_locally(step: PairedStep, *shards: Array) -> Array:
    """What a step makes of the shards of one device."""
    if isinstance(step, Multiply):
        return jnp.einsum(step.formula, *shards)
    if isinstance(step, Overlap):
        return _overlap(step, *shards)
    (shard,) = shards
    return _cut(step, shard) if isinstance(step, Slice) else _communicate(step, shard)


def _overlap(step: Overlap, left: Array, right: Array) -> Array:
    """A product that overlaps with its collective."""
    axes, letter = step.collective.axes, step.letter
    if not step.is_gather:
        return product_scatter(step.formula, left, right, axes=axes, dim=letter)
    if step.collective.operand == step.operands[1]:
        left, right = right, left
    return gather_product(step.formula, left, right, axes=axes, dim=letter)


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
