"""Attention of the newest tokens over a KV cache, contiguous (`Cache`) or in pages (`PagedCache`)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec as P

from meshwright.execution.models.attention import Scoring
from meshwright.execution.models.generation.cache import Cache, split_axes, with_tokens
from meshwright.execution.models.generation.paged_cache import (
    PagedCache,
    Pages,
    TokenSizes,
    read_pages,
    with_tokens_in_pages,
)
from meshwright.execution.models.generation.paged_kernel import attend_to_pages, fits_kernel
from meshwright.execution.models.generation.paged_kernel_tpu import attend_to_pages_on_tpu, fits_tpu_kernel
from meshwright.execution.models.generation.query_sets import Partial
from meshwright.execution.runtime.mesh import mesh_platform
from meshwright.execution.runtime.sharding_context import ShardingContext

CACHED_ATTENTION = "cached_attention"
"""Named scope of attention over the cache and of writes to it."""


@jax.named_scope(CACHED_ATTENTION)
def write_and_attend(
    query: Array,
    new: Cache | None,
    cache: Cache | PagedCache,
    layer: Array | int,
    positions: Array,
    layout: ShardingContext,
    scoring: Scoring,
    window: int | None,
    *,
    sinks: Array | None = None,
    is_latent: bool = False,
) -> tuple[Array, Any]:
    """Write new tokens to a cache and attend to it; return the output [b, s, k, g, h] and the updated cache.

    Softmax is in float32. Queries are sent to the devices that hold the cache, and outputs back. If slots are split
    over devices, each device attends to its own slots; the largest scores are combined first, then the weighted values
    and the sums of weights are summed (flash decoding, pytorch.org/blog/flash-decoding).

    Args:
        query: queries [b, s, k, g, h] at `positions` [b, s]. s is 1 unless the cache is paged.
        new: keys and values [b, s, k, h] of the same tokens, which are written before attention reads the cache; None
          if an earlier layer has written them. They then have as many dims as queries.
        cache: the cache of all layers with this window; `layer` is this layer's index in it.
        sinks: logits [k, g], added to the denominator of each softmax without a value.
        is_latent: whether the cache holds latents. Then queries are [b, s, 1, heads, rank + rotary], and outputs are
          averaged latents [b, s, 1, heads, rank].
    """
    parts = split_axes(layout, is_latent) if layout.cache_split == "sequence" else ()
    kernel = None
    if isinstance(cache, PagedCache):
        cache = cache if new is None else with_tokens_in_pages(cache, new, layer, positions)
        whole: Any = jax.typeof(cache.pages.rows).sharding.spec
        stored, rows = whole[1:], whole[1]
        of_queries = query.shape[2], query.shape[4], query.shape[4]
        heads, key, value = of_queries if new is None else (*new.key.shape[2:], new.value.shape[3])
        sizes = TokenSizes(heads // layout.mesh.degree(whole[3] or ()), key, value)
        kernel = _kernel_of(cache, sizes)
        arrays: Any = (cache.pages, jnp.asarray(layer), *(jax.reshard(x, P(rows)) for x in cache[1:3]))
        specs: Any = (
            jax.tree.map(lambda array: jax.typeof(array).sharding.spec, cache.pages),
            *(P(), P(rows, None), P(rows)),
        )
        read = partial(_read_pages, sizes=sizes, slots=parts, window=window, scoring=scoring, dtype=query.dtype)
    else:
        cache = cache if new is None else with_tokens(cache, new, layer, positions)
        arrays = tuple(lax.dynamic_index_in_dim(array, layer, 0, keepdims=False) for array in cache)
        stored = jax.typeof(arrays[0]).sharding.spec
        specs = (stored, stored)
        read = partial(_read_slots, slots=arrays[0].shape[2], parts=parts, window=window, scoring=scoring)

    batch, heads, group = (layout.axes(name) or None for name in ("batch", "kv_heads", "group"))
    heads, group = (None, heads) if is_latent else (heads, group)
    across = group if parts else None
    if layout.cache_split == "heads":
        there = P(batch, None, heads, group, None)
    else:
        there = P(stored[0], None, heads, None, None)
    result = P(*there[:3], across or there[3], None)
    if kernel is not None:
        attended = partial(kernel, window=window, scoring=scoring, is_latent=is_latent)
        local = partial(_attend_to_pages, kernel=attended, parts=parts, across=across)
    else:
        local = partial(_attend_on_device, read=read, parts=parts, across=across, scoring=scoring, is_latent=is_latent)
    # Two reshards: first split rows over fsdp (with latents they are not yet), then exchange heads for rows.
    rows = layout.axes("batch") + (layout.axes("embed") if layout.cache_split == "batch" else ())
    between = P(rows or None, None, heads, group, None)
    of_heads = P(there[2], there[3])
    specs = (there, P(stored[0], None), of_heads, *specs)
    attend = jax.shard_map(local, in_specs=specs, out_specs=result, check_vma=kernel is None)
    heads_output = attend(
        jax.reshard(jax.reshard(query, between), there),
        jax.reshard(positions, P(stored[0], None)),
        None if sinks is None else jax.reshard(sinks.astype(jnp.float32), of_heads),
        *arrays,
    )
    # Results return through the same intermediate sharding.
    return jax.reshard(jax.reshard(heads_output, between), P(batch, None, heads, group, None)), cache


def _read_slots(
    positions: Array,
    key: Array,
    value: Array,
    *,
    slots: int,
    parts: tuple[str, ...],
    window: int | None,
    scoring: Scoring,
) -> tuple[Array, Array, Array]:
    """Return a device's keys and values [b, k, t, h], and the mask [b, s, t] that is True where a query attends.

    slots: number of slots of a row over all devices. parts: mesh axes that split them.
    """
    own = jnp.arange(key.shape[2]) + (lax.axis_index(parts) * key.shape[2] if parts else 0)
    # Distance from the query back to the newest position that is in each slot.
    distance = (positions[:, :, None] - own[None, None]) % slots
    visible = distance <= positions[:, :, None]
    if window is not None:
        visible &= scoring.is_within(distance, positions[:, :, None], window)
    return key, value, visible


def _read_pages(
    positions: Array,
    pages: Pages,
    layer: Array,
    table: Array,
    first: Array,
    *,
    sizes: TokenSizes,
    slots: tuple[str, ...],
    window: int | None,
    scoring: Scoring,
    dtype: Any,
) -> tuple[Array, Array, Array]:
    """Like `_read_slots`, for pages; `slots` and the arguments that `_read_slots` lacks are those of `read_pages`."""
    key, value, distance = read_pages(pages, layer, table, first, positions, sizes=sizes, slots=slots, dtype=dtype)
    visible = distance >= 0
    if window is not None:
        visible &= scoring.is_within(distance, positions[:, :, None], window)
    return key, value, visible


def _attend_to_pages(
    query: Array,
    positions: Array,
    sinks: Array | None,
    pages: Pages,
    layer: Array,
    table: Array,
    first: Array,
    *,
    kernel: Callable[..., Partial],
    parts: tuple[str, ...],
    across: tuple[str, ...] | None,
) -> Array:
    """Like `_attend_on_device`, with a kernel (`_kernel_of`). table, first: as in `PagedCache`."""
    slots = pages.rows.shape[2]
    own = kernel(
        query,
        positions,
        pages,
        layer,
        table,
        first,
        offset=lax.axis_index(parts) * slots if parts else 0,
        page_size=slots * (lax.axis_size(parts) if parts else 1),
    )
    if sinks is None and not parts:
        return (own.product / own.sums[..., None]).astype(query.dtype)
    largest = own.largest if sinks is None else jnp.maximum(own.largest, sinks[None, None])
    largest = lax.pmax(largest, parts) if parts else largest
    rescale = jnp.exp(own.largest - largest)
    return _combined(own.product * rescale[..., None], own.sums * rescale, largest, sinks, parts, across, query.dtype)


def _attend_on_device(
    query: Array,
    positions: Array,
    sinks: Array | None,
    *stored: Any,
    read: Callable[..., tuple[Array, Array, Array]],
    parts: tuple[str, ...],
    across: tuple[str, ...] | None,
    scoring: Scoring,
    is_latent: bool,
) -> Array:
    """Return the attention output on one device, combined over the devices that share the rows.

    Args:
        stored: the arrays of the cache, as `read` takes them.
        read: returns keys, values and the mask, given positions and `stored`.
        parts: mesh axes that split the slots.
        across: those of `parts` that split the query heads of the result; None if slots are not split.
    """
    key, value, visible = read(positions, *stored)
    scored = partial(jnp.einsum, "bskgh,bkth->bskgt", preferred_element_type=jnp.float32)
    if is_latent:
        rank = key.shape[-1]
        scores, value = scored(query[..., :rank], key) + scored(query[..., rank:], value), key
    else:
        scores = scored(query, key)
    scores = scoring.of_products(scores) + jnp.where(visible, 0.0, -jnp.inf)[:, :, None, None]
    largest = jnp.max(scores, axis=-1, keepdims=True)
    if sinks is not None:
        sinks = sinks[None, None, :, :, None]
        largest = jnp.maximum(largest, sinks)
    largest = lax.pmax(largest, parts) if parts else largest
    weights = jnp.exp(scores - largest)
    sums = jnp.sum(weights, axis=-1)
    product = jnp.einsum("bskgt,bkth->bskgh", weights.astype(value.dtype), value, preferred_element_type=jnp.float32)
    return _combined(
        product, sums, largest[..., 0], None if sinks is None else sinks[0, 0, ..., 0], parts, across, query.dtype
    )


def _combined(
    product: Array,
    sums: Array,
    largest: Array,
    sinks: Array | None,
    parts: tuple[str, ...],
    across: tuple[str, ...] | None,
    dtype: Any,
) -> Array:
    """Return the attention output [b, s, k, g, h] in `dtype`, from the results of the devices that share the rows.

    Args:
        product: values [b, s, k, g, h] summed with weights exp(score - largest) over a device's keys.
        sums: sums of these weights [b, s, k, g].
        largest: largest score of each query over all devices [b, s, k, g].
        sinks: logits [k, g], one for each softmax; None without sinks.
        parts: mesh axes that split the slots.
        across: those of `parts` that split the query heads of the result; None if slots are not split.
    """
    if sinks is not None:
        # If a row is split over devices, only one device adds its sink.
        own_share = jnp.exp(sinks[None, None] - largest)
        sums += jnp.where(lax.axis_index(parts) == 0, own_share, 0.0) if parts else own_share
    sums = sums[..., None]
    if parts:
        rest = tuple(axis for axis in parts if axis not in (across or ()))

        def add(x: Array) -> Array:
            x = lax.psum_scatter(x, across, scatter_dimension=3, tiled=True) if across else x
            return lax.psum(x, rest) if rest else x

        product, sums = add(product.astype(dtype)), add(sums)
    return (product / sums).astype(dtype)


def _kernel_of(cache: PagedCache, sizes: TokenSizes) -> Callable[..., Partial] | None:
    """Return the kernel for attention over pages on the devices of the current mesh; None where pages are gathered."""
    rows: Any = cache.pages.rows
    _, num_pages, slots, _ = jax.typeof(rows).sharding.shard_shape(rows.shape)
    if mesh_platform() == "gpu" and fits_kernel(cache.pages, slots):
        return partial(attend_to_pages, sizes=sizes)
    table_size = cache.table.size * num_pages // rows.shape[1]
    if mesh_platform() == "tpu" and fits_tpu_kernel(slots, table_size):
        return partial(attend_to_pages_on_tpu, sizes=sizes)
    return None
