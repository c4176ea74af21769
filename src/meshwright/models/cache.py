"""The KV cache of generation: every row of a batch has a position of its own.

Slot t of a row holds the keys and values of the token at position t. Slots of padding after a short prompt are masked
until they are overwritten.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec as P

from meshwright.models.attention import Scoring
from meshwright.runtime import ShardingContext
from meshwright.step import ModelConfig


class Cache(NamedTuple):
    """Keys and values [layers, batch, length, kv_heads, head_dim]; of one layer without the first dim."""

    key: Array
    value: Array


def empty_cache(model: ModelConfig, layout: ShardingContext, num_rows: int, length: int, dtype: Any) -> Cache:
    """A cache of zeros: rows sharded as a batch, slots as a sequence, heads over tp."""
    spec = layout.spec("layers", "batch", "sequence", "kv_heads", "head_dim")
    shape = (model.num_layers, num_rows, length, model.num_kv_heads, model.head_dim)
    return Cache(*(jnp.zeros(shape, dtype, out_sharding=spec) for _ in Cache._fields))


def with_prompts(cache: Cache, new: Cache, layer: Array) -> Cache:
    """The cache with the keys and values [b, s, k, h] of whole prompts written for one layer."""

    def put(whole: Array, new: Array) -> Array:
        spec: Any = jax.typeof(whole).sharding.spec
        gathered = jax.reshard(new.astype(whole.dtype), P(spec[1], None, *spec[3:]))
        padded = jnp.pad(gathered, ((0, 0), (0, whole.shape[2] - new.shape[1]), (0, 0), (0, 0)))
        return jax.lax.dynamic_update_index_in_dim(whole, jax.reshard(padded, P(*spec[1:])), layer, 0)

    return Cache(*map(put, cache, new))


def with_tokens(cache: Cache, new: Cache, layer: Array, positions: Array) -> Cache:
    """The cache with the keys and values [b, 1, k, h] of one token a row, at positions [b, 1], written for one layer.

    Each device writes its own rows and slots.
    """

    def put(whole: Array, new: Array) -> Array:
        spec: Any = jax.typeof(whole).sharding.spec
        new = jax.reshard(new.astype(whole.dtype), P(spec[1], None, *spec[3:]))

        def local(whole: Array, new: Array, layer: Array, positions: Array) -> Array:
            rows, length = whole.shape[1:3]
            first = jax.lax.axis_index(spec[2]) * length if spec[2] else 0
            slots = positions[:, 0] - first
            slots = jnp.where((slots >= 0) & (slots < length), slots, length)  # Those of other devices are dropped.
            return whole.at[layer, jnp.arange(rows), slots].set(new[:, 0], mode="drop")

        specs = (spec, jax.typeof(new).sharding.spec, P(), P(spec[1], None))
        return jax.shard_map(local, in_specs=specs, out_specs=spec)(whole, new, layer, positions)

    return Cache(*map(put, cache, new))


def attend_to_cache(
    query: Array, cache: Cache, layer: Array, positions: Array, scoring: Scoring, window: Array | int | None
) -> Array:
    """The attention output of queries [b, s, k, g, h] at positions [b, s] over one layer of a cache.

    Softmax is in float32. If slots are sharded, each device scores its own; maxima and sums are all-reduced.
    """
    key, value = (jax.lax.dynamic_index_in_dim(array, layer, 0, keepdims=False) for array in cache)
    rows, slots, heads = jax.typeof(key).sharding.spec[:3]
    scores = jnp.einsum("bskgh,btkh->bkgst", query, key, preferred_element_type=jnp.float32) / scoring.divisor
    if scoring.softcap:
        scores = scoring.softcap * jnp.tanh(scores / scoring.softcap)
    distance = positions[:, :, None] - jax.reshard(jnp.arange(key.shape[1]), P(slots))[None, None, :]
    visible = distance >= 0
    if window is not None:
        visible &= distance < window
    scores += jnp.where(visible, 0.0, -jnp.inf)[:, None, None]
    weights = jax.nn.softmax(scores, axis=-1).astype(value.dtype)
    product = partial(jnp.einsum, out_sharding=P(rows, None, heads, None, None))
    return product("bkgst,btkh->bskgh", weights, value, preferred_element_type=jnp.float32).astype(query.dtype)
