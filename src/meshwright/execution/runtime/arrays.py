"""Declared parameters as arrays: shardings, abstract values for lowering, and initialization into shards."""

from __future__ import annotations

import math
import zlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from meshwright.description.step.parameter_tree import CHOICE_BIAS, Parameter, Tree, map_leaves
from meshwright.description.step.rules import local_parameter_shape
from meshwright.description.step.workload import Dtype
from meshwright.execution.runtime.sharding_context import ShardingContext

DTYPES: dict[Dtype, Any] = {"bf16": jnp.bfloat16, "f32": jnp.float32}


def widest(*dtypes: Any) -> Any:
    """Return the widest of some floating dtypes; `jnp.promote_types` would raise under strict promotion."""
    return max(map(jnp.dtype, dtypes), key=lambda dtype: dtype.itemsize)


def fit(array: Any, shape: tuple[int, ...]) -> Any:
    """Return a parameter, or an optimizer moment, changed from the shape in a file to a mesh's padded one, or back.

    A dim that grows to a multiple of its size repeats each element; one that shrinks to a divisor drops the copies.
    Other dims are padded with zeros at the end, or cut there (`step.padding`). When kv heads are copied, query heads
    are only grouped anew, which is a reshape. Dims that change must not be sharded.

    array: a NumPy array, or under `jax.jit` a JAX array.
    """
    if array.shape == shape:
        return array
    is_on_host = isinstance(array, np.ndarray)
    if array.size == math.prod(shape):
        if is_on_host:
            return array.reshape(shape)
        return jax.lax.reshape(array, shape, out_sharding=jax.typeof(array).sharding.spec)
    xp: Any = np if is_on_host else jnp
    for dim, (own, size) in enumerate(zip(array.shape, shape, strict=True)):
        before = (slice(None),) * dim
        if own < size and size % own == 0:
            array = xp.repeat(array, size // own, axis=dim)
        elif own < size:
            array = xp.pad(array, [(0, size - own if at == dim else 0) for at in range(array.ndim)])
        elif own > size:
            array = array[(*before, slice(None, None, own // size) if own % size == 0 else slice(size))]
    return array


def shardings(declared: Tree[Parameter], mesh: Mesh | AbstractMesh, layout: ShardingContext) -> Tree[NamedSharding]:
    """Return the sharding of every parameter. Raises if a mesh degree does not divide a dim."""

    def sharding(path: str, parameter: Parameter) -> NamedSharding:
        local_parameter_shape(parameter, mesh=layout.mesh, rules=layout.rules, what=path)
        return NamedSharding(mesh, layout.spec(*parameter.axes))

    return map_leaves(sharding, declared)


def abstract(declared: Tree[Parameter], mesh: Mesh | AbstractMesh, layout: ShardingContext, dtype: Dtype) -> Tree[Any]:
    """Return every parameter as a `jax.ShapeDtypeStruct` with its sharding, for lowering."""
    return jax.tree.map(
        lambda parameter, sharding: jax.ShapeDtypeStruct(parameter.shape, DTYPES[dtype], sharding=sharding),
        declared,
        shardings(declared, mesh, layout),
    )


def abstract_for_inference(
    declared: Tree[Parameter], mesh: Mesh | AbstractMesh, layout: ShardingContext, dtype: Dtype
) -> Tree[Any]:
    """Like `abstract`, but expert-selection biases stay in float32: rounding would change which experts are chosen."""
    return map_leaves(
        lambda path, leaf: leaf.update(dtype=jnp.float32) if path.endswith(CHOICE_BIAS) else leaf,
        abstract(declared, mesh, layout, dtype),
    )


def initialise(declared: Tree[Parameter], key: Array, mesh: Mesh, layout: ShardingContext, dtype: Dtype) -> Tree[Array]:
    """Initialize every parameter directly in its shards. Values depend on the key and the path, not on the mesh."""

    def draw(key: Array) -> Tree[Array]:
        return map_leaves(lambda path, parameter: _draw(path, parameter, key, DTYPES[dtype]), declared)

    return jax.jit(draw, out_shardings=shardings(declared, mesh, layout))(key)


def _draw(path: str, parameter: Parameter, key: Array, dtype: Any) -> Array:
    if parameter.init == "ones":
        return jnp.ones(parameter.shape, dtype)
    # A checksum, because Python's hash of a string differs between processes.
    own = jax.random.fold_in(key, zlib.crc32(path.encode()))
    if parameter.init == "uniform":
        return jax.random.uniform(own, parameter.shape, dtype, -parameter.scale, parameter.scale)
    if parameter.init == "log uniform":
        # Kept away from 0, so that no logarithm is minus infinity.
        return jnp.log(jax.random.uniform(own, parameter.shape, dtype, 1e-2, parameter.scale))
    return parameter.scale * jax.random.normal(own, parameter.shape, dtype)
