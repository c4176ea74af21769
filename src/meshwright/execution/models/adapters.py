"""Merge low-rank adapters into the weights that they adapt, so that a model runs without adapters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from meshwright.description.step import blocks
from meshwright.description.step.layer import Linear
from meshwright.description.step.model import ModelConfig
from meshwright.description.step.parameter_tree import LORA_A, LORA_B, is_adapter


def merge_adapters(params: Mapping[str, Any], model: ModelConfig) -> dict[str, Any]:
    """Return a model's parameters with W + scale * A B in place of each adapted weight W, and without its adapters.

    The sum is computed in float32 and cast to the dtype of W. Call this under `jax.jit`.
    """
    found = dict(params)
    for stack in blocks.layers(model):
        weights = dict(params[stack.name])
        for op in stack.ops:
            if isinstance(op, Linear) and op.low_rank:
                a, b = weights[f"{op.name}{LORA_A}"], weights[f"{op.name}{LORA_B}"]
                weights[op.name] = _with_branch(weights[op.name], a, b, op.low_rank.scale)
        found[stack.name] = {name: array for name, array in weights.items() if not is_adapter(name)}
    return found


def _with_branch(weight: Array, a: Array, b: Array, scale: float) -> Array:
    """Compute W [layers, *inputs, *outputs] + scale * A [layers, *inputs, rank] B [layers, rank, *outputs]."""
    letters = "abcdefghij"[: weight.ndim]
    inputs, outputs = letters[1 : a.ndim - 1], letters[a.ndim - 1 :]
    wide = (array.astype(jnp.float32) for array in (a, b))
    spec = jax.typeof(weight).sharding.spec
    added = jnp.einsum(f"a{inputs}z,az{outputs}->{letters}", *wide, out_sharding=spec)
    return (weight.astype(jnp.float32) + jnp.float32(scale) * added).astype(weight.dtype)
