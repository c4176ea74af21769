"""The contiguous KV cache of generation, in which every row of a batch has its own position.

A cache holds the keys and values of all layers with the same attention window. Each row has `slots` slots, one token
each: position p is in slot p mod slots. With a window there are as many slots as the window has tokens, so that a new
token replaces the oldest one; without a window there is a slot for every position. Slots of padding after a short
prompt are masked until they are overwritten.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from meshwright.description.step.model import ModelConfig
from meshwright.description.step.padding import padded
from meshwright.description.step.serve import cache_slots, layers_by_window
from meshwright.execution.runtime.sharding_context import ShardingContext


class Cache(NamedTuple):
    """The keys and values of a cache, or of new tokens of one layer that are not yet written to it.

    Arrays of a cache are [layers, batch, kv_heads, slots, head_dim]: because slots are next to the head dim, TPUs write
    a token and read a layer without copying the whole cache. Arrays of new tokens are [batch, seq, kv_heads, head_dim].

    With latent attention there is one kv head: `key` holds the latents, whose head dim is their rank and from which
    keys and values are computed, and `value` holds the rotary part of the keys, which all query heads share.
    """

    key: Array
    value: Array


Caches = tuple[Cache, ...]
"""The caches of a model, one for each attention window, in the order of `layers_by_window`."""


def abstract_caches(model: ModelConfig, layout: ShardingContext, num_rows: int, length: int, dtype: Any) -> Caches:
    """Return a model's caches for rows of up to `length` tokens, as `jax.ShapeDtypeStruct`s with shardings."""
    latent = model.attention.latent
    split = layout.mesh.degree(split_axes(layout, latent is not None)) if layout.cache_split == "sequence" else 1

    def of(window: int | None, count: int) -> Cache:
        heads, *sizes = cached_sizes(model, layout, window)
        rows = (count, num_rows, heads, cache_slots(window, length, split))
        sharding = NamedSharding(jax.sharding.get_abstract_mesh(), cache_spec(layout, latent is not None))
        return Cache(*(jax.ShapeDtypeStruct((*rows, size), dtype, sharding=sharding) for size in sizes))  # type: ignore

    return tuple(of(window, count) for window, count in layers_by_window(model).items())


def cached_sizes(model: ModelConfig, layout: ShardingContext, window: int | None) -> tuple[int, int, int]:
    """Return the kv heads that layers with this window cache, and the sizes of their keys and values (`Cache`)."""
    if latent := model.attention.latent:
        return 1, latent.kv_rank, latent.rope_head_dim
    stored = padded(model, layout.mesh, layout.rules)
    stored = stored.with_full_heads if window is None else stored
    return stored.num_kv_heads, stored.head_dim, stored.head_dim


def empty_caches(abstract: Caches) -> Caches:
    """Return caches of zeros with the shapes, dtypes and shardings of `abstract`."""
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype, out_sharding=leaf.sharding.spec), abstract)


def split_axes(layout: ShardingContext, is_latent: bool) -> tuple[str, ...]:
    """Return the mesh axes that may split rows or slots of a cache: fsdp and sp; for latents (one head) also tp."""
    return layout.axes("embed") + layout.axes("group") + (layout.axes("kv_heads") if is_latent else ())


def cache_spec(layout: ShardingContext, is_latent: bool) -> P:
    """Return the spec of a cache: heads over tp; `layout.cache_split` says whether rows or slots are split too."""
    parts = split_axes(layout, is_latent)
    rows = layout.axes("batch") + (parts if layout.cache_split == "batch" else ())
    slots = parts if layout.cache_split == "sequence" else ()
    return P(None, rows or None, None if is_latent else layout.axes("kv_heads") or None, slots or None, None)


def with_prompts(cache: Cache, new: Cache, layer: Array | int, lengths: Array) -> Cache:
    """Return the cache with the keys and values `new` [b, s, k, h] of whole prompts written to one layer.

    new: has at least as many rows as the cache; extra rows are ignored. lengths: prompt length of each row [b].
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
    """Return the last `slots` tokens of each row of `new` [b, s, k, h], as [b, slots, k, h]: position p at p mod slots.

    If the tokens are split, each device writes its own tokens, and the results are summed over devices. lengths: the
    number of tokens of each row [b].
    """
    spec: Any = jax.typeof(new).sharding.spec
    along = spec[1] or ()

    def local(new: Array, lengths: Array) -> Array:
        rows, length = new.shape[:2]
        first = lax.axis_index(along) * length if along else 0
        positions = first + jnp.arange(length)[None]
        is_kept = (positions < lengths[:, None]) & (positions >= lengths[:, None] - slots)
        places = jnp.where(is_kept, positions % slots, slots)  # Index `slots` is out of range and dropped.
        empty = jnp.zeros((rows, slots, *new.shape[2:]), new.dtype)
        written = empty.at[jnp.arange(rows)[:, None], places].set(new, mode="drop")
        return lax.psum(written, along) if along else written

    result = P(spec[0], None, *spec[2:])
    return jax.shard_map(local, in_specs=(spec, P(spec[0])), out_specs=result)(new, jax.reshard(lengths, P(spec[0])))


def with_tokens(cache: Cache, new: Cache, layer: Array | int, positions: Array) -> Cache:
    """Return the cache with the keys and values `new` [b, 1, k, h] of one token a row written to one layer.

    positions: the position of each row's token [b, 1]. Each device writes its own rows and slots.
    """

    def put(whole: Array, new: Array) -> Array:
        spec: Any = jax.typeof(whole).sharding.spec
        new = jax.reshard(new.astype(whole.dtype), P(spec[1], None, spec[2], None))

        def local(whole: Array, new: Array, layer: Array, positions: Array) -> Array:
            slots = positions[:, 0] % num_slots
            if spec[3]:
                length = whole.shape[3]
                slots -= lax.axis_index(spec[3]) * length
                slots = jnp.where((slots >= 0) & (slots < length), slots, length)  # Out of range is dropped.
            # As in `with_tokens_in_pages`: a slice in the place of the heads makes XLA:TPU copy the whole cache.
            rows, heads = jnp.arange(whole.shape[1])[:, None], jnp.arange(whole.shape[2])
            return whole.at[layer, rows, heads, slots[:, None]].set(
                new[:, 0], mode="drop", unique_indices=True, indices_are_sorted=True
            )

        num_slots = whole.shape[3]
        specs = (spec, jax.typeof(new).sharding.spec, P(), P(spec[1], None))
        own = jax.reshard(positions, P(spec[1], None))
        return jax.shard_map(local, in_specs=specs, out_specs=spec)(whole, new, jnp.asarray(layer), own)

    return Cache(*map(put, cache, new))
