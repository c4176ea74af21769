"""Sum the gradients of kv heads that tp copies to several devices (`step.padding`), so that the copies stay equal."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from meshwright.description.step.padding import kv_copies
from meshwright.description.step.parameter_tree import leaves, map_leaves, parameters
from meshwright.description.step.workload import Workload
from meshwright.execution.runtime.sharding_context import ShardingContext


def sum_over_copies(gradients: Any, workload: Workload, layout: ShardingContext) -> Any:
    """Return gradients with each copy of a kv head replaced by the sum over its copies, computed in float32.

    Each device writes the gradient of its copy into an array of all heads; one all-reduce over the axes that split
    heads sums these arrays.
    """
    axes = layout.axes("kv_heads")

    def summed(array: Array, dim: int, copies: int) -> Array:
        spec = jax.typeof(array).sharding.spec

        def local(own: Array) -> Array:
            head = jax.lax.axis_index(axes) // copies
            shape = tuple(array.shape[dim] // copies if at == dim else size for at, size in enumerate(own.shape))
            heads = jax.lax.dynamic_update_slice_in_dim(
                jnp.zeros(shape, jnp.float32), own.astype(jnp.float32), head, dim
            )
            return jax.lax.dynamic_slice_in_dim(jax.lax.psum(heads, axes), head, 1, dim).astype(own.dtype)

        return jax.shard_map(local, in_specs=spec, out_specs=spec, check_vma=False)(array)

    return _on_copied(summed, gradients, workload, layout)


def each_once(gradients: Any, workload: Workload, layout: ShardingContext) -> Any:
    """Return gradients whose global norm counts each kv head once: those of heads with c copies, divided by sqrt(c)."""
    return _on_copied(
        lambda array, _, copies: array * jnp.asarray(1 / math.sqrt(copies), array.dtype), gradients, workload, layout
    )


def _on_copied(
    change: Callable[[Array, int, int], Array], gradients: Any, workload: Workload, layout: ShardingContext
) -> Any:
    """Return gradients with `change` applied to those of copied kv heads.

    change: a function of the array, of the dim of kv heads, and of the number of copies of each.
    """
    copies = dict(kv_copies(workload.model, layout.mesh, layout.rules))
    if not copies:
        return gradients
    dims = {
        path: parameter.axes.index("kv_heads")
        for path, parameter in leaves(parameters(workload.model))
        if path in copies
    }
    return map_leaves(lambda path, array: change(array, dims[path], copies[path]) if path in dims else array, gradients)
