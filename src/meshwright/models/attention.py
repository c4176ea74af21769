"""Causal attention with grouped query heads, and rotary position embedding."""

from __future__ import annotations

import math
from dataclasses import replace

import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from meshwright.models.dropout import Draws, dropped_weights
from meshwright.workload import ModelConfig, num_query_chunks

INTERMEDIATE = "intermediate"
"""The name of what products read, which the remat policies `none` and `attention` keep for backward."""

PRODUCT = "product"
"""The name of the results of products, which all remat policies but `block` and `offload` keep for backward."""

SCORES = "scores"
"""The name of attention's scores, which only the remat policy `none` keeps for backward."""


def rotate(x: Array, positions: Array, model: ModelConfig) -> Array:
    """Rotary embedding (arXiv:2104.09864) of x [batch, sequence, ..., head_dim] at its positions.

    `positions` are [sequence], or [batch, sequence] where rows differ. The two halves of a head turn together, as in
    the published Llama weights.
    """
    angles = positions[..., None].astype(jnp.float32) * _frequencies(model)
    shape = (-1, positions.shape[-1], *(1,) * (x.ndim - 3), model.head_dim // 2)
    cos, sin = jnp.cos(angles).reshape(shape), jnp.sin(angles).reshape(shape)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


def _frequencies(model: ModelConfig) -> Array:
    """The angle a position adds, for each pair of a head [head_dim / 2]."""
    frequencies = model.rope_theta ** (-jnp.arange(0, model.head_dim, 2, dtype=jnp.float32) / model.head_dim)
    scaling = model.rope_scaling
    if scaling is None:
        return frequencies
    # Long waves are slowed by `factor`, short ones are left, those between are blended.
    turns = scaling.original_max_seq_len * frequencies / (2 * math.pi)
    blend = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    blend = jnp.clip(blend, 0.0, 1.0)
    return frequencies * (blend + (1 - blend) / scaling.factor)


def attend(query: Array, key: Array, value: Array, positions: Array, draws: Draws | None = None) -> Array:
    """Causal attention: query [b, s, kv_heads, group, head_dim] over key, value [b, t, kv_heads, head_dim].

    `positions` [s] are the places of the queries among the t keys, which start at 0; a query sees keys up to its own.
    Scores and softmax are float32; `draws` say which weights are dropped. Returns an array of the query's shape and
    dtype.
    """
    num_chunks = num_query_chunks(query.shape[1])
    if num_chunks == 1:
        return _mix(checkpoint_name(_scores(query, key), SCORES), value, positions, draws)
    # Chunk j takes every num_chunks-th query from j: so a sequence split over a mesh axis is split evenly in each.
    b, s, *heads = query.shape
    chunks = jnp.moveaxis(query.reshape(b, s // num_chunks, num_chunks, *heads), 2, 0)
    places = jnp.moveaxis(positions.reshape(s // num_chunks, num_chunks), 1, 0)
    tokens = draws and jnp.moveaxis(draws.tokens.reshape(b, s // num_chunks, num_chunks), 2, 0)

    def chunk(each: tuple[Array, Array, Array | None]) -> Array:
        query, positions, tokens = each
        here = None if draws is None or tokens is None else replace(draws, tokens=tokens)
        return _mix(_scores(query, key), value, positions, here)

    # Each chunk's scores are made again in backward; a name would keep them all.
    mixed = jax.lax.map(jax.checkpoint(chunk), (chunks, places, tokens))
    return jnp.moveaxis(mixed, 0, 2).reshape(query.shape)


def _scores(query: Array, key: Array) -> Array:
    """How much each query wants each key, [b, kv_heads, group, s, t] in float32."""
    return jnp.einsum("bskgh,btkh->bkgst", query, key, preferred_element_type=jnp.float32) / math.sqrt(query.shape[-1])


def _mix(scores: Array, value: Array, positions: Array, draws: Draws | None) -> Array:
    """The values that queries at `positions` mix by their scores, [b, s, kv_heads, group, head_dim]."""
    visible = positions[:, None] >= jnp.arange(value.shape[1])[None, :]
    weights = jax.nn.softmax(jnp.where(visible, scores, -jnp.inf), axis=-1).astype(value.dtype)
    return jnp.einsum("bkgst,btkh->bskgh", dropped_weights(weights, draws), value)
