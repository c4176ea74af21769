"""Weights of layers stored in int8 or nf4, and dequantized to the dtype of the matmuls for each use.

In int8 each column of a weight has a scale, its largest absolute value / 127 (weight-only quantisation as in
arXiv:2208.07339, without its outliers). In nf4 each block of up to 64 elements has a scale, its largest absolute value
(arXiv:2305.14314, section 3). Weights in int8 take half the bytes of bf16, so a decode step reads half as much.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from meshwright.description.step.parameter_tree import Parameter
from meshwright.description.step.trained import (
    BaseFormat,
    StoredArray,
    blocked_dim,
    stored_weight,
    summed_dims,
)
from meshwright.execution.runtime.sharding_context import ShardingContext

NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
"""The values of nf4: quantiles of a normal distribution, with an exact zero (arXiv:2305.14314, appendix E)."""


class Int8Weight(NamedTuple):
    """A weight [layers, …] in int8, and the scale of each column, with size 1 in the dims that the matmul sums over."""

    values: Array
    scale: Array


class Nf4Weight(NamedTuple):
    """A weight in nf4, two elements a byte; see `description.step.trained.stored_weight`.

    One dim of the weight becomes two: [blocks, block / 2] in `values` (uint8), and [blocks, 1] in `scale`.
    """

    values: Array
    scale: Array


Quantised = Int8Weight | Nf4Weight

FORMATS: Mapping[BaseFormat, type[Quantised]] = {"int8": Int8Weight, "nf4": Nf4Weight}
STORED = {"int8": jnp.int8, "uint8": jnp.uint8, "bf16": jnp.bfloat16, "f32": jnp.float32}
"""{name of a dtype in `StoredArray`: JAX's dtype}."""


def quantised(weight: Array, parameter: Parameter, base: BaseFormat) -> Quantised:
    """Return a weight [layers, …] quantised to the format `base`, with its sharding. Call it under `jax.jit`."""
    if base == "int8":
        wide, summed = weight.astype(jnp.float32), summed_dims(parameter)
        scale = jnp.max(jnp.abs(wide), axis=summed, keepdims=True) / 127
        return Int8Weight(jnp.round(wide / jnp.maximum(scale, 1e-30)).astype(jnp.int8), scale)
    dim, block = blocked_dim(parameter)
    spec: Any = jax.typeof(weight).sharding.spec
    stored = P(*spec[: dim + 1], None, *spec[dim + 1 :])

    def local(weight: Array) -> tuple[Array, Array]:
        # One layer at a time, because it is computed in float32.
        return jax.lax.map(lambda own: _in_nf4(own, dim - 1, block), weight)

    # No device has a part of a block.
    return Nf4Weight(*jax.shard_map(local, in_specs=spec, out_specs=(stored, stored))(weight))


def abstract_quantised(
    parameter: Parameter, base: BaseFormat, mesh: Mesh | AbstractMesh, layout: ShardingContext
) -> Any:
    """Return the quantised weight of a parameter as `jax.ShapeDtypeStruct`s with shardings."""

    def abstract(array: StoredArray) -> jax.ShapeDtypeStruct:
        sharding = NamedSharding(mesh, layout.spec(*array.parameter.axes))
        return jax.ShapeDtypeStruct(array.parameter.shape, STORED[array.dtype], sharding=sharding)

    return FORMATS[base](*map(abstract, stored_weight(parameter, base)))  # type: ignore


def _in_nf4(weight: Array, dim: int, block: int) -> tuple[Array, Array]:
    """Return the bytes (uint8) and scales (bf16) of one layer's weight, in blocks of `block` elements along `dim`."""
    shape = (*weight.shape[:dim], weight.shape[dim] // block, block, *weight.shape[dim + 1 :])
    wide = weight.astype(jnp.float32).reshape(shape)
    scale = jnp.max(jnp.abs(wide), axis=dim + 1, keepdims=True).astype(jnp.bfloat16)
    shares = wide / jnp.maximum(scale.astype(jnp.float32), 1e-30)
    middles = [(low + high) / 2 for low, high in itertools.pairwise(NF4)]
    codes = sum((shares > middle).astype(jnp.uint8) for middle in middles)
    low, high = jnp.split(codes, 2, axis=dim + 1)
    return low | (high << jnp.uint8(4)), scale


def dequantised(weight: Any, dtype: Any) -> Any:
    """Return a weight in `dtype`; one that is not quantised is unchanged."""
    if isinstance(weight, Int8Weight):
        return (weight.values.astype(jnp.float32) * weight.scale).astype(dtype)
    if not isinstance(weight, Nf4Weight):
        return weight
    values, scale = weight
    dim = next(dim for dim, (own, one) in enumerate(zip(values.shape, scale.shape, strict=True)) if own != one)
    halves = (values & jnp.uint8(15), values >> jnp.uint8(4))
    # The table depends on the layer: `jax.lax.scan` would make an array of the weight's size of each of its values once
    # for all layers, which GPUs then read from memory (JAX 0.10.2).
    table, _ = jax.lax.optimization_barrier((jnp.asarray(NF4, jnp.float32), scale))
    # Each half is computed by itself, so that compilers write no array to memory but the result.
    blocks = jnp.concatenate(
        [(_values_of_codes(half, list(table)) * scale.astype(jnp.float32)).astype(dtype) for half in halves], dim
    )
    spec: Any = jax.typeof(values).sharding.spec
    shape = (*blocks.shape[: dim - 1], blocks.shape[dim - 1] * blocks.shape[dim], *blocks.shape[dim + 1 :])
    return jax.lax.reshape(blocks, shape, out_sharding=P(*spec[:dim], *spec[dim + 1 :]))


def plain(tree: Any, dtype: Any) -> Any:
    """Return a tree of parameters with every quantised weight in `dtype`."""
    return jax.tree.map(lambda leaf: dequantised(leaf, dtype), tree, is_leaf=is_quantised)


def is_quantised(leaf: Any) -> bool:
    """Whether a leaf of a parameter tree is a quantised weight."""
    return isinstance(leaf, Int8Weight | Nf4Weight)


def _values_of_codes(codes: Array, table: Sequence[Array]) -> Array:
    """Return table[code] of each code, by selects, which run at memory speed on every device; TPUs index slower."""
    if len(table) == 1:
        return table[0]
    half = len(table) // 2
    is_high = (codes & jnp.uint8(half)) != 0
    return jnp.where(is_high, _values_of_codes(codes, table[half:]), _values_of_codes(codes, table[:half]))


def layer_weights(
    stored: Mapping[str, Any] | tuple[Mapping[str, Any], ...], number: Array | int, dtype: Any
) -> dict[str, Array]:
    """Return the weights of layer `number` of a stack by name, those of `BaseFormat`s converted to `dtype`.

    stored: weights stacked over layers; or a tuple with a mapping for each layer, and then `number` is a Python int.
    """
    if isinstance(stored, tuple):
        own = stored[number]
    else:
        own = jax.tree.map(lambda leaf: jax.lax.dynamic_index_in_dim(leaf, number, 0, keepdims=False), stored)
    return plain(dict(own), dtype)
