"""A KV cache in pages, which a server assigns to texts as they grow (arXiv:2309.06180).

Layers with the same attention window share a cache. A page holds `page_size` consecutive tokens of one text, in all of
these layers; a table lists the pages of each row. Devices with different rows have separate pages, numbered from 0 on
each of them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from meshwright.description.step.model import ModelConfig
from meshwright.description.step.serve import layers_by_window
from meshwright.execution.models.generation.cache import Cache, cache_spec, cached_sizes
from meshwright.execution.runtime.sharding_context import ShardingContext


class Pages(NamedTuple):
    """Keys and values [layers, pages, kv_heads, page_size, head_dim]; for latent attention, see `Cache`.

    scales: if keys and values are int8, the scales of keys and of values, each [layers, pages, kv_heads, page_size];
    else None. The scale of a token and head is its largest absolute value / 127.
    """

    key: Array
    value: Array
    scales: tuple[Array, Array] | None = None


class PagedCache(NamedTuple):
    """Pages, and where in them each row of a step has its tokens.

    Args:
        table: page indices of each row [rows, entries]. Entry i of a row is the page with its tokens from position
          (first + i) * page_size.
        first: for each row, the index in its text of the first page in the table [rows].
        is_token: True for tokens of the step [rows, s], which are written; False for padding.
    """

    pages: Pages
    table: Array
    first: Array
    is_token: Array


def abstract_pages(
    model: ModelConfig, layout: ShardingContext, counts: tuple[int, ...], page_size: int, dtype: Any
) -> tuple[Pages, ...]:
    """Return a model's pages as `jax.ShapeDtypeStruct`s, a `Pages` for each window in the order of `layers_by_window`.

    Args:
        counts: for each window, the number of pages on a device.
        page_size: tokens of a page; a multiple of the degree that splits slots.
        dtype: dtype of keys and values; int8 adds scales.
    """
    spec = cache_spec(layout, model.attention.latent is not None)
    shards = layout.mesh.degree(page_axes(layout, model))

    def array(shape: tuple[int, ...], dtype: Any, dims: P) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(jax.sharding.get_abstract_mesh(), dims))

    def of(window: int | None, layers: int, count: int) -> Pages:
        heads, *sizes = cached_sizes(model, layout, window)
        slots = (layers, count * shards, heads, page_size)
        key, value = (array((*slots, size), dtype, spec) for size in sizes)
        is_scaled = jnp.dtype(dtype) == jnp.int8
        scale = array(slots, jnp.float32, P(*spec[:4]))
        return Pages(key, value, (scale, scale) if is_scaled else None)

    windows = layers_by_window(model).items()
    return tuple(of(*window, count) for window, count in zip(windows, counts, strict=True))


def page_axes(layout: ShardingContext, model: ModelConfig) -> tuple[str, ...]:
    """Return the mesh axes whose devices have different rows, and therefore separate pages."""
    return cache_spec(layout, model.attention.latent is not None)[1] or ()


def with_tokens_in_pages(cache: PagedCache, new: Cache, layer: Array | int, positions: Array) -> PagedCache:
    """Return the cache with the keys and values `new` [b, s, k, h] of tokens written to one layer.

    positions: positions of the tokens [b, s]. Each device writes its own rows and slots.
    """
    pages = cache.pages
    spec: Any = jax.typeof(pages.key).sharding.spec
    rows, heads, slots = spec[1], spec[2], spec[3]
    arrays, scales = list[Array](), list[Array]()
    for array in new:
        placed = jax.reshard(array, P(rows, None, heads, None))
        if pages.scales is not None:
            wide = placed.astype(jnp.float32)
            scale = jnp.max(jnp.abs(wide), axis=-1) / 127
            scales.append(scale)
            placed = jnp.round(wide / jnp.maximum(scale, 1e-30)[..., None]).astype(jnp.int8)
        arrays.append(placed.astype(pages.key.dtype))

    def local(
        stored: list[Array], new: list[Array], layer: Array, positions: Array, table: Array, first: Array, kept: Array
    ) -> list[Array]:
        num_pages, num_slots = stored[0].shape[1], stored[0].shape[3]
        page_size = num_slots * (lax.axis_size(slots) if slots else 1)
        slot = positions % page_size - (lax.axis_index(slots) * num_slots if slots else 0)
        page = jnp.take_along_axis(table, positions // page_size - first[:, None], axis=1, mode="clip")
        is_here = kept & (slot >= 0) & (slot < num_slots)
        page = jnp.where(is_here, page, num_pages)  # Index `num_pages` is out of range and dropped.
        # With a slice in the place of the heads, XLA:TPU copies the whole cache into a layout with heads next to the
        # head dim, and back, in every step (libtpu 0.0.42.1).
        at = (layer, page[..., None], jnp.arange(stored[0].shape[2]), slot[..., None])
        return [whole.at[at].set(own, mode="drop") for whole, own in zip(stored, new, strict=True)]

    stored = [pages.key, pages.value, *(pages.scales or ())]
    added = [*arrays, *scales]
    by_row = [jax.reshard(array, P(rows, None)) for array in (positions, cache.table, cache.is_token)]
    written = jax.shard_map(
        local,
        in_specs=(
            [jax.typeof(array).sharding.spec for array in stored],
            [jax.typeof(array).sharding.spec for array in added],
            *(P(), P(rows, None), P(rows, None), P(rows), P(rows, None)),
        ),
        out_specs=[jax.typeof(array).sharding.spec for array in stored],
    )(stored, added, jnp.asarray(layer), by_row[0], by_row[1], jax.reshard(cache.first, P(rows)), by_row[2])
    key, value, *scales = written
    return cache._replace(pages=Pages(key, value, (scales[0], scales[1]) if scales else None))


def read_pages(
    pages: Pages, layer: Array, table: Array, first: Array, positions: Array, slots: tuple[str, ...], dtype: Any
) -> tuple[Array, Array, Array]:
    """Return keys and values [b, k, t, h] of each row's pages on one device, and their distances [b, s, t].

    A distance is the query's position less the key's; it is negative for keys after the query.

    Args:
        table, first: as in `PagedCache`.
        positions: positions of the queries [b, s].
        slots: mesh axes that split the slots of a page.
        dtype: dtype to which int8 keys and values are converted.
    """

    def gathered(stored: Array, scale: Array | None) -> Array:
        found = stored.at[layer, table].get(mode="clip")  # [b, entries, k, slots, h]
        if scale is not None:
            own = scale.at[layer, table].get(mode="clip")[..., None]
            found = (found.astype(jnp.float32) * own).astype(dtype)
        return jnp.moveaxis(found, 2, 1).reshape(table.shape[0], stored.shape[2], -1, stored.shape[4])

    num_slots = pages.key.shape[3]
    own = jnp.arange(num_slots) + (lax.axis_index(slots) * num_slots if slots else 0)
    page_size = num_slots * (lax.axis_size(slots) if slots else 1)
    numbers = first[:, None] + jnp.arange(table.shape[1])[None]
    of_slots = (numbers[..., None] * page_size + own[None, None]).reshape(table.shape[0], -1)
    key_scale, value_scale = pages.scales or (None, None)
    keys, values = gathered(pages.key, key_scale), gathered(pages.value, value_scale)
    return keys, values, positions[:, :, None] - of_slots[:, None]
