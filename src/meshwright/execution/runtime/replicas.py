"""Unreduced gradients of replicated parameters as rows, one for each replica, where JAX's types cannot express them.

The gradient of an array typed `reduced` over mesh axes is unreduced over these axes. JAX 0.10.2 cannot `vmap` over,
slice or branch on such arrays. Instead, the replicas of a parameter become rows of an extra dim, sharded over their
devices. Each row gets the gradient of its replica, summed over microbatches. The transpose of `stack_replicas` converts
the rows into an unreduced gradient, which is summed over devices once per step.
"""

from __future__ import annotations

from functools import partial

import jax
from jax import Array, lax
from jax.sharding import PartitionSpec as P

from meshwright.execution.runtime.sharding_context import ShardingContext
from meshwright.execution.runtime.shards import on_shards


def stack_replicas(array: Array, dim: int) -> Array:
    """Return an array with a new dim `dim` that has one row per replica; unchanged if no axis is `reduced`."""
    spec = jax.typeof(array).sharding.spec
    axes = tuple(sorted(spec.reduced))
    if not axes:
        return array
    rows = P(*spec.partitions[:dim], axes, *spec.partitions[dim:])

    def local(array: Array) -> Array:
        return lax.expand_dims(lax.pcast(array, axes, to="varying"), (dim,))

    return jax.shard_map(local, in_specs=spec, out_specs=rows)(array)


def unstack_replicas(rows: Array, spec: P, layout: ShardingContext) -> Array:
    """Return the array of this spec from its replicas along the first dim: the inverse of `stack_replicas`."""
    return _unstack(spec, layout, rows) if spec.reduced else rows


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _unstack(spec: P, layout: ShardingContext, rows: Array) -> Array:
    """Return each device's row for `unstack_replicas`; all rows are equal, which no type expresses."""
    plain = P(*spec.partitions)
    split = P(tuple(sorted(spec.reduced)), *spec.partitions)
    array = on_shards(lambda rows: rows[0], layout, in_specs=(split,), out_specs=plain, check_vma=False)(rows)
    return jax.reshard(array, spec)


def _forward(spec: P, layout: ShardingContext, rows: Array) -> tuple[Array, None]:
    return _unstack(spec, layout, rows), None


def _backward(spec: P, layout: ShardingContext, _: None, gradient: Array) -> tuple[Array]:
    unreduced = P(*spec.partitions, unreduced=spec.reduced)
    split = P(tuple(sorted(spec.reduced)), *spec.partitions)
    rows = on_shards(lambda part: part[None], layout, in_specs=(unreduced,), out_specs=split, check_vma=False)
    return (rows(gradient),)


_unstack.defvjp(_forward, _backward)
