"""Merge low-rank adapters into the weights that they adapt; compute the column norms of DoRA adapters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec as P

from meshwright.description.step.blocks import program
from meshwright.description.step.layer import Linear, Lookup, LowRank
from meshwright.description.step.lora import EMBEDDING, UNEMBEDDING
from meshwright.description.step.model import ModelConfig
from meshwright.description.step.parameter_tree import LORA_A, LORA_B, LORA_M, is_adapter
from meshwright.execution.models.quantised.weights import dequantised


def merged_model(model: ModelConfig) -> ModelConfig:
    """Return the model, without adapters, whose parameters `merge_adapters` returns.

    If the lookup or the output head has an adapter, tied embeddings are untied, because one weight cannot hold both.
    """
    is_tied = model.tied_embeddings and not _ends(model)
    return replace(model, lora=None, tied_embeddings=is_tied)


def merge_adapters(params: Mapping[str, Any], model: ModelConfig) -> dict[str, Any]:
    """Return the parameters of `merged_model`: each adapted weight W becomes W + scale * A B.

    With DoRA, each column of the sum is then scaled to the column's magnitude. The sum is computed in float32 and cast
    to the dtype of W. Call this under `jax.jit`.
    """
    found: dict[str, Any] = {name: array for name, array in params.items() if not is_adapter(name)}
    branches = _ends(model)
    if model.tied_embeddings and branches:
        found[UNEMBEDDING] = params[EMBEDDING].T
    for name, branch in branches.items():
        found[name] = _merged(found[name], params, name, branch)
    for stack in program(model).stacks:
        own = params[stack.name]
        merged = {op.name: _merged(own[op.name], own, op.name, branch) for op, branch in _adapted(stack.ops)}
        found[stack.name] = {name: array for name, array in own.items() if not is_adapter(name)} | merged
    return found


def first_magnitudes(params: Mapping[str, Any], model: ModelConfig, dtype: Any) -> dict[str, Any]:
    """Return the initial magnitudes of DoRA, {stack: {parameter name: array}}: column norms of the adapted weights.

    PEFT starts from these too. B is zero at first, so the adapted model then equals the model. Call this under
    `jax.jit`.

    Args:
        params: the parameters, whose weights may be quantised.
        model: the model, with its adapters.
        dtype: dtype to which quantised weights are dequantised.
    """

    def norms(weights: Mapping[str, Any], op: Linear) -> Array:
        # One layer at a time, because it is computed in float32.
        found = jax.lax.map(lambda own: _norms(dequantised(own, dtype), len(op.inputs)), weights[op.name])
        return jax.reshard(found, jax.typeof(weights[f"{op.name}{LORA_M}"]).sharding.spec)

    return {
        stack.name: {
            f"{op.name}{LORA_M}": norms(params[stack.name], op).astype(params[stack.name][f"{op.name}{LORA_M}"].dtype)
            for op, branch in _adapted(stack.ops) if branch.has_magnitude
        }
        for stack in program(model).stacks
    }  # fmt: skip


def factors(weights: Mapping[str, Any], name: str) -> tuple[Array, Array]:
    """Return the weights A and B of the low-rank branch of the matmul or lookup `name`, given a layer's `weights`."""
    return weights[f"{name}{LORA_A}"], weights[f"{name}{LORA_B}"]


def column_norms(weight: Array, a: Array, b: Array, scale: float) -> Array:
    """Return the Euclidean norms [*lead, *outputs] of the columns of W + scale * A B, in float32 without a gradient.

    Args:
        weight: W [*lead, *inputs, *outputs], sharded as stored: squares are summed over the devices that split inputs.
        a, b: A [*lead, *inputs, rank] and B [*lead, rank, *outputs].
        scale: the factor of A B.
    """
    lead = a.ndim + b.ndim - 2 - weight.ndim
    return _norms(_sum(_constant(weight), _constant(a), _constant(b), scale), a.ndim - 1 - lead, lead)


def _norms(weight: Array, num_inputs: int, lead: int = 0) -> Array:
    """Return the column norms [*lead, *outputs] of a weight [*lead, *inputs, *outputs], in float32."""
    wide = weight.astype(jnp.float32)
    return jnp.sqrt(jnp.sum(wide * wide, axis=tuple(range(lead, lead + num_inputs))))


def _constant(array: Array) -> Array:
    """Return an array without a gradient, and with a type that is not `reduced` over any mesh axis."""
    return jax.reshard(jax.lax.stop_gradient(array), P(*jax.typeof(array).sharding.spec.partitions))


def magnitude_over_norm(magnitude: Array, norms: Array) -> Array:
    """Return magnitude / norm of each column in float32; 0 for columns of zeros, which pad heads."""
    is_zero = norms == 0
    return jnp.where(is_zero, 0, magnitude.astype(jnp.float32) / jnp.where(is_zero, 1, norms))


def _ends(model: ModelConfig) -> dict[str, LowRank]:
    """Return the low-rank branches outside the layers, by parameter name: `EMBEDDING`, `UNEMBEDDING`, both or none."""
    found = program(model)
    ops = {op.name: op for op in found.embedding if isinstance(op, Lookup)}
    ends = ops | {op.branch: op for op in found.logits if isinstance(op, Linear)}
    return {name: op.low_rank for name, op in ends.items() if op.low_rank}


def _adapted(ops: tuple[Any, ...]) -> Iterator[tuple[Linear, LowRank]]:
    """Yield (matmul, branch) for each matmul that has a low-rank branch."""
    yield from ((op, op.low_rank) for op in ops if isinstance(op, Linear) and op.low_rank)


def _merged(weight: Array, weights: Mapping[str, Any], name: str, branch: LowRank) -> Array:
    """Return a weight with its low-rank branch added and, with DoRA, its columns scaled to their magnitudes.

    weights: all arrays of the layer, among them those of the branch of the matmul or lookup `name`.
    """
    a, b = factors(weights, name)
    total = _sum(weight, a, b, branch.scale)
    if branch.has_magnitude:
        share = magnitude_over_norm(weights[f"{name}{LORA_M}"], column_norms(weight, a, b, branch.scale))
        lead = a.ndim + b.ndim - 2 - weight.ndim
        wide = jnp.expand_dims(share, tuple(range(lead, a.ndim - 1)))
        total = total * jnp.broadcast_to(wide, total.shape, out_sharding=jax.typeof(total).sharding)
    return total.astype(weight.dtype)


def _sum(weight: Array, a: Array, b: Array, scale: float) -> Array:
    """Compute W [*lead, *inputs, *outputs] + scale * A [*lead, *inputs, rank] B [*lead, rank, *outputs] in float32."""
    lead = a.ndim + b.ndim - 2 - weight.ndim
    letters = "abcdefghij"[: weight.ndim]
    first, inputs, outputs = letters[:lead], letters[lead : a.ndim - 1], letters[a.ndim - 1 :]
    wide = (array.astype(jnp.float32) for array in (a, b))
    spec = jax.typeof(weight).sharding.spec
    added = jnp.einsum(f"{first}{inputs}z,{first}z{outputs}->{letters}", *wide, out_sharding=spec)
    return weight.astype(jnp.float32) + jnp.float32(scale) * added
