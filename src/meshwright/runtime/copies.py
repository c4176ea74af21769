"""Weights whose gradients stay apart on the devices that hold copies, where no type can say so.

The gradient of an array that is typed reduced over axes is still to be summed over them. JAX 0.10.2 neither maps over
such arrays, nor slices them, nor branches over them. So the copies become the rows of one more dim that is split over
their devices, each of which has one: the gradients of rows are those of the copies, and added up apart. Their sum over
devices is the transpose of `in_rows`: the gradient of what the copies are of, still to be summed, as its type says.
"""

from __future__ import annotations

from functools import partial

import jax
from jax import Array, lax
from jax.sharding import PartitionSpec as P

from meshwright.runtime.layout import Layout
from meshwright.runtime.shards import on_shards


def in_rows(array: Array, dim: int) -> Array:
    """An array with one row for each of its copies, along a new dim; as it is where it is not typed reduced."""
    spec = jax.typeof(array).sharding.spec
    axes = tuple(sorted(spec.reduced))
    if not axes:
        return array
    rows = P(*spec.partitions[:dim], axes, *spec.partitions[dim:])

    def local(array: Array) -> Array:
        return lax.expand_dims(lax.pcast(array, axes, to="varying"), (dim,))

    return jax.shard_map(local, in_specs=spec, out_specs=rows)(array)


def of_rows(rows: Array, spec: P, layout: Layout) -> Array:
    """The array of this spec, typed reduced, from its rows along the first dim."""
    return _of_rows(spec, layout, rows) if spec.reduced else rows


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _of_rows(spec: P, layout: Layout, rows: Array) -> Array:
    """`of_rows`; rows are alike, which no type says."""
    plain = P(*spec.partitions)
    split = P(tuple(sorted(spec.reduced)), *spec.partitions)
    array = on_shards(lambda rows: rows[0], layout, in_specs=(split,), out_specs=plain, check_vma=False)(rows)
    return jax.reshard(array, spec)


def _forward(spec: P, layout: Layout, rows: Array) -> tuple[Array, None]:
    """The array; backward needs nothing."""
    return _of_rows(spec, layout, rows), None


def _backward(spec: P, layout: Layout, _: None, gradient: Array) -> tuple[Array]:
    """What each device has of the gradient, as a row."""
    unreduced = P(*spec.partitions, unreduced=spec.reduced)
    split = P(tuple(sorted(spec.reduced)), *spec.partitions)
    rows = on_shards(lambda part: part[None], layout, in_specs=(unreduced,), out_specs=split, check_vma=False)
    return (rows(gradient),)


_of_rows.defvjp(_forward, _backward)
