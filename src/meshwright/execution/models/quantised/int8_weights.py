"""Weights of layers stored in int8: half the memory of bf16, and half the bytes that a step of decoding reads.

Each column of a matmul has a scale, its largest absolute value over 127 (weight-only quantisation as in
arXiv:2208.07339, without its outliers). Matmuls are computed with the dequantized weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from meshwright.description.step.blocks import layers
from meshwright.description.step.layer import Linear
from meshwright.description.step.model import ModelConfig


class Int8Weight(NamedTuple):
    """A weight [layers, …] in int8, and the scale of each column, of size 1 along the dims that matmuls sum over."""

    values: Array
    scale: Array


def in_int8(params: Mapping[str, Any], model: ModelConfig) -> dict[str, Any]:
    """Convert the matmul weights of layers to int8, keeping their sharding; routers and all else are unchanged."""

    def quantise(weight: Array, summed: tuple[int, ...]) -> Int8Weight:
        wide = weight.astype(jnp.float32)
        scale = jnp.max(jnp.abs(wide), axis=summed, keepdims=True) / 127
        values = jnp.round(wide / jnp.maximum(scale, 1e-30)).astype(jnp.int8)
        return Int8Weight(values, scale)

    quantised = jax.jit(quantise, static_argnums=1)
    found = dict(params)
    for stack in layers(model):
        weights = dict(found[stack.name])
        for op in stack.ops:
            if isinstance(op, Linear) and not op.is_on_residual and op.name in weights:
                # Summed dims are before the columns, and after layers and experts.
                last = weights[op.name].ndim - len(op.outputs)
                weights[op.name] = quantised(weights[op.name], tuple(range(last - len(op.inputs), last)))
        found[stack.name] = weights
    return found


def layer_weights(
    stored: Mapping[str, Any] | tuple[Mapping[str, Any], ...], number: Array | int, dtype: Any
) -> dict[str, Array]:
    """Return the weights of one layer of a stack, dequantizing those in int8.

    stored: stacked, or a mapping for each layer, of which `number` is then a Python number.
    """
    if isinstance(stored, tuple):
        own = stored[number]
    else:
        own = jax.tree.map(lambda leaf: jax.lax.dynamic_index_in_dim(leaf, number, 0, keepdims=False), stored)

    def dequantized(weight: Array | Int8Weight) -> Array:
        if isinstance(weight, Int8Weight):
            return (weight.values.astype(jnp.float32) * weight.scale).astype(dtype)
        return weight

    return {name: dequantized(weight) for name, weight in own.items()}
