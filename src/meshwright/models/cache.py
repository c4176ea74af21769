"""The KV cache of generation: every row of a batch has a position of its own.

A cache has all layers with one window, and of each row `slots` tokens: position p is in slot p mod slots. Layers with a
window need no more slots than it has tokens, so that a new token replaces the one that left the window; other layers
have a slot for every position. Slots of padding after a short prompt are masked until they are overwritten.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from meshwright.models.attention import Scoring
from meshwright.runtime import ShardingContext
from meshwright.step import ModelConfig
from meshwright.step.serve import cache_slots, layers_by_window


class Cache(NamedTuple):
    """Keys and values [layers, batch, kv_heads, slots, head_dim]; those of tokens [batch, seq, kv_heads, head_dim].

    With slots beside the dims of a head, TPUs write a token and read a layer without a copy of the whole cache.

    Of latent attention the latent [layers, batch, 1, slots, rank] stands in place of keys, for both, and the rotary
    part of keys in place of values: one head that all queries share.
    """

    key: Array
    value: Array


Caches = tuple[Cache, ...]
"""The caches of a model, one for each window in the order of `layers_by_window`."""


def abstract_caches(
    model: ModelConfig, layout: ShardingContext, num_rows: int, length: int, dtype: Any, *, unit: int = 1
) -> Caches:
    """The caches of a model for sequences of up to `length` tokens: shapes and shardings.

    unit: slots are allotted on each device in so many at a time.
    """
    latent = model.latent
    split = unit * (
        layout.mesh.degree(split_axes(layout, latent is not None)) if layout.cache_split == "sequence" else 1
    )
    heads = 1 if latent else model.num_kv_heads
    sizes = (latent.kv_rank, latent.rope_head_dim) if latent else (model.head_dim, model.head_dim)

    def of(window: int | None, count: int) -> Cache:
        rows = (count, num_rows, heads, cache_slots(window, length, split))
        sharding = NamedSharding(jax.sharding.get_abstract_mesh(), cache_spec(layout, latent is not None))
        return Cache(*(jax.ShapeDtypeStruct((*rows, size), dtype, sharding=sharding) for size in sizes))  # type: ignore

    return tuple(of(window, count) for window, count in layers_by_window(model).items())


def empty_caches(abstract: Caches) -> Caches:
    """Caches of zeros."""
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype, out_sharding=leaf.sharding.spec), abstract)


def split_axes(layout: ShardingContext, is_latent: bool) -> tuple[str, ...]:
    """The mesh axes that split a cache beyond its heads; of a latent, which has one, those of heads too."""
    return layout.axes("embed") + layout.axes("group") + (layout.axes("kv_heads") if is_latent else ())


def cache_spec(layout: ShardingContext, is_latent: bool) -> P:
    """The sharding of a cache: heads over tp, and beside them its rows, its slots or nothing."""
    parts = split_axes(layout, is_latent)
    rows = layout.axes("batch") + (parts if layout.cache_split == "batch" else ())
    slots = parts if layout.cache_split == "sequence" else ()
    return P(None, rows or None, None if is_latent else layout.axes("kv_heads") or None, slots or None, None)


def with_prompts(cache: Cache, new: Cache, layer: Array | int, lengths: Array) -> Cache:
    """The cache with the keys and values [b, s, k, h] of whole prompts written for one layer.

    new: of at least the cache's rows; others are left out. lengths: of each row [b].
    """

    def put(whole: Array, new: Array) -> Array:
        spec: Any = jax.typeof(whole).sharding.spec
        rows, slots = whole.shape[1], whole.shape[3]
        new = new.astype(whole.dtype)
        fitted = jnp.moveaxis(_last_tokens(new, lengths, slots) if slots < new.shape[1] else new, 2, 1)
        if rows < fitted.shape[0]:
            fitted = jax.reshard(fitted, P(None, *jax.typeof(fitted).sharding.spec[1:]))[:rows]
        # Slots are padded before they are split.
        fitted = jax.reshard(fitted, P(spec[1], spec[2], None, None))
        padded = jnp.pad(fitted, ((0, 0), (0, 0), (0, slots - fitted.shape[2]), (0, 0)))
        return lax.dynamic_update_index_in_dim(whole, jax.reshard(padded, P(*spec[1:])), layer, 0)

    return Cache(*map(put, cache, new))


def _last_tokens(new: Array, lengths: Array, slots: int) -> Array:
    """The last `slots` tokens of each row of `new` [b, s, k, h], each in the slot of its position: [b, slots, k, h].

    Each device writes the tokens that it has; over sp they are added up.
    """
    spec: Any = jax.typeof(new).sharding.spec
    along = spec[1] or ()

    def local(new: Array, lengths: Array) -> Array:
        rows, length = new.shape[:2]
        first = lax.axis_index(along) * length if along else 0
        positions = first + jnp.arange(length)[None]
        is_kept = (positions < lengths[:, None]) & (positions >= lengths[:, None] - slots)
        places = jnp.where(is_kept, positions % slots, slots)  # Others are dropped.
        empty = jnp.zeros((rows, slots, *new.shape[2:]), new.dtype)
        written = empty.at[jnp.arange(rows)[:, None], places].set(new, mode="drop")
        return lax.psum(written, along) if along else written

    result = P(spec[0], None, *spec[2:])
    return jax.shard_map(local, in_specs=(spec, P(spec[0])), out_specs=result)(new, jax.reshard(lengths, P(spec[0])))


def with_tokens(cache: Cache, new: Cache, layer: Array | int, positions: Array) -> Cache:
    """The cache with the keys and values [b, 1, k, h] of one token a row, at positions [b, 1], written for one layer.

    Each device writes its own rows and slots.
    """

    def put(whole: Array, new: Array) -> Array:
        spec: Any = jax.typeof(whole).sharding.spec
        new = jax.reshard(new.astype(whole.dtype), P(spec[1], None, spec[2], None))

        def local(whole: Array, new: Array, layer: Array, positions: Array) -> Array:
            slots = positions[:, 0] % num_slots
            if spec[3]:
                length = whole.shape[3]
                slots -= lax.axis_index(spec[3]) * length
                slots = jnp.where((slots >= 0) & (slots < length), slots, length)  # Other devices' are dropped.
            return whole.at[layer, jnp.arange(whole.shape[1]), :, slots].set(
                new[:, 0], mode="drop", unique_indices=True, indices_are_sorted=True
            )

        num_slots = whole.shape[3]
        specs = (spec, jax.typeof(new).sharding.spec, P(), P(spec[1], None))
        own = jax.reshard(positions, P(spec[1], None))
        return jax.shard_map(local, in_specs=specs, out_specs=spec)(whole, new, jnp.asarray(layer), own)

    return Cache(*map(put, cache, new))


def attend_to_cache(
    query: Array,
    cache: Cache,
    layer: Array | int,
    positions: Array,
    layout: ShardingContext,
    scoring: Scoring,
    window: int | None,
    *,
    sinks: Array | None = None,
    is_latent: bool = False,
) -> Array:
    """The attention output of queries [b, 1, k, g, h] at positions [b, 1] over one layer of a cache.

    sinks: logits [k, g] that take a share of each softmax. is_latent: whether the cache is of latents: queries
    [b, 1, 1, heads, rank + rotary] give latents.

    Softmax is in float32. Queries are sent to where the cache is, and their results back: over split slots each device
    attends to its own, and the maxima, then the weighted values and the sums of weights are added up (flash decoding,
    pytorch.org/blog/flash-decoding).
    """
    key, value = (lax.dynamic_index_in_dim(array, layer, 0, keepdims=False) for array in cache)
    batch, heads, group = (layout.axes(name) or None for name in ("batch", "kv_heads", "group"))
    heads, group = (None, heads) if is_latent else (heads, group)
    stored: Any = jax.typeof(key).sharding.spec
    parts = split_axes(layout, is_latent) if layout.cache_split == "sequence" else ()
    across = group if parts else None
    if layout.cache_split == "heads":
        there = P(batch, None, heads, group, None)
    else:
        there = P(stored[0], None, heads, None, None)
    local = partial(
        _attend_on_device,
        slots=key.shape[2],
        parts=parts,
        across=across,
        scoring=scoring,
        window=window,
        is_latent=is_latent,
    )
    result = P(*there[:3], across or there[3], None)
    # Rows over fsdp first, which queries of latents are not split over yet, then heads over what splits their rows.
    rows = layout.axes("batch") + (layout.axes("embed") if layout.cache_split == "batch" else ())
    between = P(rows or None, None, heads, group, None)
    of_heads = P(there[2], there[3])
    heads_output = jax.shard_map(
        local, in_specs=(there, stored, stored, P(stored[0], None), of_heads), out_specs=result
    )(
        jax.reshard(jax.reshard(query, between), there),
        key,
        value,
        jax.reshard(positions, P(stored[0], None)),
        None if sinks is None else jax.reshard(sinks.astype(jnp.float32), of_heads),
    )
    # Back by the way they came.
    return jax.reshard(jax.reshard(heads_output, between), P(batch, None, heads, group, None))


def _attend_on_device(
    query: Array,
    key: Array,
    value: Array,
    positions: Array,
    sinks: Array | None,
    *,
    slots: int,
    parts: tuple[str, ...],
    across: tuple[str, ...] | None,
    scoring: Scoring,
    window: int | None,
    is_latent: bool,
) -> Array:
    """`attend_to_cache` on one device. slots: of all devices. parts: the axes that split them, across: of these, those
    that split the query heads of a result."""
    scored = partial(jnp.einsum, "bskgh,bkth->bskgt", preferred_element_type=jnp.float32)
    if is_latent:
        rank = key.shape[-1]
        scores, value = scored(query[..., :rank], key) + scored(query[..., rank:], value), key
    else:
        scores = scored(query, key)
    scores /= scoring.divisor
    if scoring.softcap:
        scores = scoring.softcap * jnp.tanh(scores / scoring.softcap)
    own = jnp.arange(key.shape[2]) + (lax.axis_index(parts) * key.shape[2] if parts else 0)
    # How long ago a slot was written: the newest position that falls into it is at most the query's.
    distance = (positions[:, :, None] - own[None, None]) % slots
    visible = distance <= positions[:, :, None]
    if window is not None:
        visible &= distance < window
    scores += jnp.where(visible, 0.0, -jnp.inf)[:, :, None, None]
    largest = jnp.max(scores, axis=-1, keepdims=True)
    if sinks is not None:
        sinks = sinks[None, None, :, :, None]
        largest = jnp.maximum(largest, sinks)
    largest = lax.pmax(largest, parts) if parts else largest
    weights = jnp.exp(scores - largest)
    sums = jnp.sum(weights, axis=-1, keepdims=True)
    if sinks is not None:
        # Of the devices that have parts of a row, one adds its sink.
        own_share = jnp.exp(sinks - largest)
        sums += jnp.where(lax.axis_index(parts) == 0, own_share, 0.0) if parts else own_share
    product = jnp.einsum("bskgt,bkth->bskgh", weights.astype(value.dtype), value, preferred_element_type=jnp.float32)
    if parts:
        rest = tuple(axis for axis in parts if axis not in (across or ()))

        def add(x: Array) -> Array:
            x = lax.psum_scatter(x, across, scatter_dimension=3, tiled=True) if across else x
            return lax.psum(x, rest) if rest else x

        product, sums = add(product.astype(query.dtype)), add(sums)
    return (product / sums).astype(query.dtype)
