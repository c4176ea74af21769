"""A KV cache in pages, which a server assigns to texts as they grow (arXiv:2309.06180).

Layers with the same attention window share a cache. A page holds `page_size` consecutive tokens of one text, in all of
these layers; a table lists the pages of each row. Devices with different rows have separate pages, numbered from 0 on
each of them.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from meshwright.description.step.model import ModelConfig
from meshwright.description.step.serve import layers_by_window
from meshwright.description.step.serving import cache_lanes
from meshwright.execution.models.generation.cache import Cache, cache_spec, cached_sizes
from meshwright.execution.runtime.mesh import mesh_platform
from meshwright.execution.runtime.sharding_context import ShardingContext

PAGE_DTYPES: dict[str, Any] = {"int8": jnp.int8, "fp8": jnp.float8_e4m3fn}
"""The dtypes that `NARROW` names for keys and values."""


class TokenSizes(NamedTuple):
    """What a device stores of a token in one layer: for each of `heads` kv heads a key, then a value, of these sizes.

    With latent attention `key` is the size of the latent and `value` that of the rotary part of keys, as in `Cache`.
    """

    heads: int
    key: int
    value: int

    @property
    def of_head(self) -> int:
        """The elements of a head: its key and value."""
        return self.key + self.value


class Pages(NamedTuple):
    """Keys and values of the layers with one attention window.

    All that a device stores of a token is one row, so that a token is written at once, and a page is read by one DMA of
    a TPU. On TPUs rows are padded to a multiple of 128 elements (`cache_lanes`). For another last dim XLA:TPU would
    choose a layout in which columns are not next to each other, and copy all pages in every step (libtpu 0.0.42.1).

    Args:
        rows: [layers, pages, page_size, width]. A device's part of `width` is the row of `TokenSizes`, then padding.
        scales: if keys and values are int8, their scales [layers, pages, 1, size]: the largest absolute value of a
          token and head, / 127. A device's part of `size` is [kv_heads, 2, page_size], for keys and values, then
          padding. None for other dtypes. In fp8 larger absolute values than 448 are stored as 448.
    """

    rows: Array
    scales: Array | None = None


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
    _, rows, tensor, slots, _ = cache_spec(layout, model.attention.latent is not None)
    shards, lanes = layout.mesh.degree(page_axes(layout, model)), cache_lanes(mesh_platform())
    heads_split, slots_split = layout.mesh.degree(tensor or ()), layout.mesh.degree(slots or ())

    def array(shape: tuple[int, ...], dtype: Any, dims: P) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(jax.sharding.get_abstract_mesh(), dims))

    def of(window: int | None, layers: int, count: int) -> Pages:
        heads, *each = cached_sizes(model, layout, window)
        sizes, pages = TokenSizes(heads // heads_split, *each), (layers, count * shards)
        width = heads_split * _padded(sizes.heads * sizes.of_head, lanes)
        stored = array((*pages, page_size, width), dtype, P(None, rows, slots, tensor))
        if jnp.dtype(dtype) != jnp.int8:
            return Pages(stored)
        size = _padded(2 * sizes.heads * (page_size // slots_split), lanes)
        both = tuple(axis for axes in (tensor, slots) for axis in ((axes,) if isinstance(axes, str) else axes or ()))
        scales = (*pages, 1, heads_split * slots_split * size)
        return Pages(stored, array(scales, jnp.float32, P(None, rows, None, both or None)))

    windows = layers_by_window(model).items()
    return tuple(of(*window, count) for window, count in zip(windows, counts, strict=True))


def _padded(size: int, unit: int) -> int:
    """Round a size up to a multiple of `unit`."""
    return -(-size // unit) * unit


def page_axes(layout: ShardingContext, model: ModelConfig) -> tuple[str, ...]:
    """Return the mesh axes whose devices have different rows, and therefore separate pages."""
    return cache_spec(layout, model.attention.latent is not None)[1] or ()


def with_tokens_in_pages(cache: PagedCache, new: Cache, layer: Array | int, positions: Array) -> PagedCache:
    """Return the cache with the keys and values `new` [b, s, k, h] of tokens written to one layer.

    positions: positions of the tokens [b, s]. Each device writes its own rows and slots.
    """
    pages = cache.pages
    spec: Any = jax.typeof(pages.rows).sharding.spec
    rows, slots, heads = spec[1:]
    placed = [jax.reshard(array, P(rows, None, heads, None)) for array in new]

    def local(
        pages: Pages, new: list[Array], layer: Array, positions: Array, table: Array, first: Array, kept: Array
    ) -> Pages:
        _, num_pages, num_slots, width = pages.rows.shape
        page_size = num_slots * (lax.axis_size(slots) if slots else 1)
        slot = positions % page_size - (lax.axis_index(slots) * num_slots if slots else 0)
        page = jnp.take_along_axis(table, positions // page_size - first[:, None], axis=1, mode="clip")
        is_here = kept & (slot >= 0) & (slot < num_slots)
        page = jnp.where(is_here, page, num_pages)  # Index `num_pages` is out of range and dropped.
        scales = pages.scales
        if scales is not None:
            wide = [array.astype(jnp.float32) for array in new]
            own = jnp.stack([jnp.max(jnp.abs(array), axis=-1) / 127 for array in wide], axis=-1)  # [b, s, k, 2]
            new = [
                jnp.round(array / jnp.maximum(own[..., which, None], 1e-30)).astype(jnp.int8)
                for which, array in enumerate(wide)
            ]
            columns = jnp.arange(own[0, 0].size)[None, None] * num_slots + slot[..., None]
            scales = scales.at[layer, page[..., None], 0, columns].set(own.reshape(columns.shape), mode="drop")
        elif pages.rows.dtype == PAGE_DTYPES["fp8"]:  # A conversion to it makes NaN of values over the largest one.
            most = float(jnp.finfo(pages.rows.dtype).max)
            new = [jnp.clip(array, -most, most) for array in new]
        row = jnp.concatenate(new, axis=-1).reshape(*positions.shape, -1).astype(pages.rows.dtype)
        row = jnp.pad(row, ((0, 0), (0, 0), (0, width - row.shape[-1])))
        return Pages(pages.rows.at[layer, page, slot].set(row, mode="drop"), scales)

    specs = jax.tree.map(lambda array: jax.typeof(array).sharding.spec, pages)
    by_row = [jax.reshard(array, P(rows, None)) for array in (positions, cache.table, cache.is_token)]
    written = jax.shard_map(
        local,
        in_specs=(
            specs,
            [jax.typeof(array).sharding.spec for array in placed],
            *(P(), P(rows, None), P(rows, None), P(rows), P(rows, None)),
        ),
        out_specs=specs,
    )(pages, placed, jnp.asarray(layer), by_row[0], by_row[1], jax.reshard(cache.first, P(rows)), by_row[2])
    return cache._replace(pages=written)


def read_pages(
    pages: Pages,
    layer: Array,
    table: Array,
    first: Array,
    positions: Array,
    *,
    sizes: TokenSizes,
    slots: tuple[str, ...],
    dtype: Any,
) -> tuple[Array, Array, Array]:
    """Return keys and values [b, k, t, h] of each row's pages on one device, and their distances [b, s, t].

    A distance is the query's position less the key's; it is negative for keys after the query.

    Args:
        table, first: as in `PagedCache`.
        positions: positions of the queries [b, s].
        sizes: what the device stores of a token.
        slots: mesh axes that split the slots of a page.
        dtype: dtype to which keys and values in int8 or fp8 are converted.
    """
    batch, num_slots = table.shape[0], pages.rows.shape[2]

    def of_heads(found: Array, *dims: int) -> Array:
        """Return what pages hold of each head, [b, entries, ..., k, *dims], without padding."""
        size = sizes.heads * math.prod(dims)
        return found[..., :size].reshape(*found.shape[:-1], sizes.heads, *dims)

    found = of_heads(pages.rows.at[layer, table].get(mode="clip"), sizes.of_head)  # [b, entries, slots, k, h]
    both = jnp.moveaxis(found, 3, 1).reshape(batch, sizes.heads, -1, sizes.of_head)
    keys, values = both[..., : sizes.key], both[..., sizes.key :]
    if pages.scales is not None:
        scales = of_heads(pages.scales.at[layer, table, 0].get(mode="clip"), 2, num_slots)  # [b, entries, k, 2, slots]
        by_token = jnp.moveaxis(scales, 1, 3).reshape(batch, sizes.heads, 2, -1, 1)
        keys, values = (
            (own.astype(jnp.float32) * by_token[:, :, which]).astype(dtype) for which, own in enumerate((keys, values))
        )
    elif pages.rows.dtype == PAGE_DTYPES["fp8"]:
        keys, values = keys.astype(dtype), values.astype(dtype)
    own = jnp.arange(num_slots) + (lax.axis_index(slots) * num_slots if slots else 0)
    page_size = num_slots * (lax.axis_size(slots) if slots else 1)
    numbers = first[:, None] + jnp.arange(table.shape[1])[None]
    of_slots = (numbers[..., None] * page_size + own[None, None]).reshape(batch, -1)
    return keys, values, positions[:, :, None] - of_slots[:, None]
