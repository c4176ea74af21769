"""Attention of new tokens over pages on NVIDIA GPUs, as a Pallas kernel that reads pages in place.

Without the kernel, XLA:GPU gathers a sequence's pages into one array and reads that array: three times the bytes. The
tokens of a sequence are divided over several programs of the grid, whose results are combined afterwards (flash
decoding, pytorch.org/blog/flash-decoding).
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from meshwright.description.hlo.kernel_cost import KernelCost
from meshwright.execution.models.attention import Scoring
from meshwright.execution.models.generation.paged_cache import Pages, TokenSizes
from meshwright.execution.models.generation.query_sets import MASKED, Partial, QuerySets
from meshwright.planning.cost.rates.triton_rows import MOST_ROWS, padded_rows


class _Tiles(NamedTuple):
    """What a program of the grid works on, and how many programs are started."""

    rows: int  # Maximum number of queries of a program.
    tokens: int  # Cached tokens that a program reads in one iteration of its loop.
    warps: int
    stages: int  # Iterations whose loads are under way at once.
    programs: int  # About how many programs a call starts; fewer if the rows have too few blocks.


_DECODE_TILES = _Tiles(MOST_ROWS, 64, warps=4, stages=3, programs=1024)
_NARROW_TILES = _Tiles(MOST_ROWS, 128, warps=4, stages=5, programs=1024)  # Of int8 and fp8.
_CHUNK_TILES = _Tiles(64, 64, warps=4, stages=3, programs=264)
_LATENT_TILES = _Tiles(32, 64, warps=4, stages=2, programs=264)
"""The fastest of those tried on an H200, which has 132 multiprocessors (JAX 0.11.2). Latents are wide: programs with
more rows keep too little in registers, those with fewer read the same latents more often."""


def fits_kernel(pages: Pages, slots: int) -> bool:
    """Whether the kernel can attend over `pages` on one device.

    False for more slots than a program reads at once, for slots that are not a power of 2, and for arrays of 2^31 to
    2^32 one-byte elements: Pallas indexes arrays of up to 4 GiB with signed 32-bit integers, which overflow there (JAX
    0.10.2 to 0.12).

    slots: tokens of each page on the device.
    """
    small = pages.rows.dtype.itemsize > 1 or pages.rows.size < 1 << 31 or pages.rows.size > 1 << 32
    return slots <= _DECODE_TILES.tokens and slots & (slots - 1) == 0 and small


def attend_to_pages(
    query: Array,
    positions: Array,
    pages: Pages,
    layer: Array,
    table: Array,
    first: Array,
    *,
    sizes: TokenSizes,
    offset: Array | int,
    page_size: int,
    window: int | None,
    scoring: Scoring,
    is_latent: bool = False,
    is_interpreted: bool = False,
) -> Partial:
    """Return attention of queries [b, s, k, g, h] at positions [b, s] over the pages of one device, as a `Partial`.

    Call it inside `jax.shard_map` without `check_vma`. The arrays of the result are [b, s, k, g, ...].

    Args:
        query: with latents [b, s, 1, heads, rank + rotary].
        pages: the device's part of each page.
        layer: index of the layer in the pages.
        table, first: as in `PagedCache`, [b, entries] and [b].
        sizes: what the device stores of a token.
        offset: the index, among all slots of a page, of this device's first slot.
        page_size: tokens of a page over all devices that share it.
        is_latent: pages hold latents, which are keys and values at once, and rotary keys.
        is_interpreted: run in Pallas's interpreter, slowly, on a CPU.
    """
    batch, length, heads, group, width = query.shape
    slots, rank = pages.rows.shape[2], sizes.key if is_latent else sizes.value
    tokens, queries = table.shape[1] * slots, length * group
    of_decode = _NARROW_TILES if pages.rows.dtype.itemsize == 1 else _DECODE_TILES
    tiles = _LATENT_TILES if is_latent else of_decode if queries <= MOST_ROWS else _CHUNK_TILES
    if pages.rows.dtype == jnp.float8_e4m3fn and query.dtype == jnp.bfloat16:
        # A GPU converts fp8 to float16, and to bfloat16 by way of that.
        limit = float(jnp.finfo(jnp.float16).max)
        query = jnp.clip(query, -limit, limit).astype(jnp.float16)
    sets = QuerySets(batch, heads, length, group, min(tiles.rows, padded_rows(queries)))
    rows, parts = sets.rows, sets.parts
    work = _divided(table.shape[1], tiles.tokens // slots, max(1, tiles.programs // (batch * heads * parts)))
    own = sets.arrays(query, rank, width - rank) if is_latent else sets.arrays(query, width)
    own = [jnp.pad(array, ((0, 0),) * 3 + ((0, padded_rows(array.shape[3]) - array.shape[3]),)) for array in own]
    numbers = [jnp.broadcast_to(jnp.asarray(one, jnp.int32), batch) for one in (first, layer, offset, 0)]
    # Merge layers, pages and slots into one dim, without a copy.
    arrays = [pages.rows.reshape(-1, pages.rows.shape[3])]
    of_head = pages.rows.dtype.itemsize * sizes.of_head
    if pages.scales is not None:
        arrays.append(pages.scales.reshape(-1))
        of_head += 2 * pages.scales.dtype.itemsize
    read = of_head * batch * heads * tokens
    written = 4 * batch * heads * parts * work.splits * rows * (rank + 2)
    kernel = partial(
        _kernel,
        page_size=page_size,
        window=window,
        scoring=scoring,
        num_pages=pages.rows.shape[1],
        sizes=sizes,
        parts=parts,
        slots=slots,
        blocks=work.blocks,
        entries=work.entries,
        is_latent=is_latent,
    )
    call = _on_grid(kernel, own, work, padded_rows(rank), len(arrays), tiles, is_interpreted=is_interpreted)
    flops = 2 * batch * heads * queries * tokens * (width + rank)
    loaded = batch * heads * tokens * (padded_rows(sizes.key) + padded_rows(sizes.value))
    with jax.named_scope(KernelCost(flops, read + written, cached=loaded).scope):
        product, sums, largest = call(
            jnp.stack(numbers, axis=1),
            jnp.tile(sets.positions(positions), (heads, 1, 1)),
            jnp.pad(table, ((0, 0), (0, work.total - table.shape[1]))),
            *own,
            *arrays,
        )
    most = jnp.max(largest, axis=2, keepdims=True)
    weights = jnp.exp(largest - most)

    return Partial(
        sets.by_token(jnp.sum(product * weights[..., None], axis=2)[..., :rank]),
        sets.by_token(jnp.sum(sums * weights, axis=2)),
        sets.by_token(most[:, :, 0]),
    )


class _Work(NamedTuple):
    """How the pages of a row are divided: each of `splits` programs reads `blocks` blocks, of `entries` pages each."""

    splits: int
    blocks: int
    entries: int

    @property
    def total(self) -> int:
        """The number of table entries that all programs read for a row, including padding at the end."""
        return self.splits * self.blocks * self.entries


def _divided(pages: int, entries: int, splits: int) -> _Work:
    """Divide a row's pages into blocks of `entries` pages, and the blocks among at most `splits` programs."""
    blocks = math.ceil(pages / entries)
    of_split = math.ceil(blocks / min(blocks, splits))
    return _Work(math.ceil(blocks / of_split), of_split, entries)


def _on_grid(
    kernel: Any, queries: list[Array], work: _Work, width: int, num_arrays: int, tiles: _Tiles, *, is_interpreted: bool
) -> Any:
    """Return `pl.pallas_call` of a kernel on the grid [sets, batch, work.splits].

    A set is up to `tiles.rows` queries of one kv head. The sets of a kv head are neighbours in the grid: they read the
    same pages, which then are in the L2 cache.

    Args:
        queries: [sets, batch, rows, h].
        width: head dim of a value.
        num_arrays: number of arrays of the cache, which programs index themselves instead of in blocks.
    """
    from jax.experimental.pallas import triton  # Imported late: 0.1 s that only GPUs need.

    sets, batch, rows, _ = queries[0].shape

    def of_row(*sizes: int) -> pl.BlockSpec:
        return pl.BlockSpec((None, *sizes), lambda of, row, split: (row, *(0 for _ in sizes)))

    def of_set(*sizes: int) -> pl.BlockSpec:
        return pl.BlockSpec((None, None, *sizes), lambda of, row, split: (of, row, *(0 for _ in sizes)))

    def of_split(*sizes: int) -> pl.BlockSpec:
        return pl.BlockSpec((None, None, None, *sizes), lambda of, row, split: (of, row, split, *(0 for _ in sizes)))

    results = ((rows, width), (rows,), (rows,))
    of_triton = triton.CompilerParams(num_warps=tiles.warps, num_stages=tiles.stages)
    options: Any = {"interpret": True} if is_interpreted else {"compiler_params": of_triton}
    blocks = [of_set(rows, query.shape[-1]) for query in queries]
    return pl.pallas_call(
        kernel,
        grid=(sets, batch, work.splits),
        in_specs=[of_row(4), of_set(rows), of_row(work.total), *blocks, *(pl.BlockSpec() for _ in range(num_arrays))],
        out_specs=[of_split(*own) for own in results],
        out_shape=[jax.ShapeDtypeStruct((sets, batch, work.splits, *own), jnp.float32) for own in results],
        name="paged_attention",
        **options,
    )


def _kernel(
    starts: Any,
    positions: Any,
    table: Any,
    query: Any,
    *rest: Any,
    page_size: int,
    window: int | None,
    scoring: Scoring,
    num_pages: int,
    sizes: TokenSizes,
    parts: int,
    slots: int,
    blocks: int,
    entries: int,
    is_latent: bool,
) -> None:
    """Attend over the pages of one split: `blocks` blocks of `entries` pages each.

    Args:
        starts: [4]: the row's `PagedCache.first`, the layer, `offset` of `attend_to_pages`, an unused entry.
        positions: positions of the queries; -1 for padding.
        rest: with latents, the queries' rotary dims; the rows of all tokens; the scales of int8 keys and values, if
            any; the three results (see `Partial`).
        parts: how many sets of queries a kv head has.
    """
    from jax.experimental.pallas import triton  # Imported late: 0.1 s that only GPUs need.

    *rotary, rows = rest[: 2 if is_latent else 1]
    *scales, product, sums, largest = rest[len(rotary) + 1 :]
    head, split = pl.program_id(0) // parts, pl.program_id(2)
    first, layer, offset = starts[0], starts[1], starts[2]
    tokens = entries * slots
    wanted, queries = positions[...], [array[...] for array in (query, *rotary)]
    newest = jnp.max(wanted)

    def read_dims(tokens: Array, begin: Array, size: int) -> Array:
        """Return `size` elements of the rows of tokens, with zeros up to a power of 2."""
        if padded_rows(size) == size:
            return rows[tokens, pl.ds(begin, size)]
        dims = jnp.arange(padded_rows(size))
        is_inside = jnp.broadcast_to(dims < size, (len(tokens), len(dims)))
        read = triton.load(rows.at[tokens[:, None], (begin + dims)[None]], mask=is_inside)
        return jnp.where(is_inside, read.astype(query.dtype), 0)

    def block(number: Array, before: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        begin = (split * blocks + number) * entries
        places = jnp.arange(tokens)
        at = (first + begin + places // slots) * page_size + offset + places % slots
        pages = table[begin + places // slots]
        page, slot, column = layer * num_pages + pages, places % slots, head * sizes.of_head
        parts_of_head = (column, sizes.key), (column + sizes.key, sizes.value)
        loaded = [read_dims(page * slots + slot, at, size) for at, size in parts_of_head]
        of_scales = [((page * sizes.heads + head) * 2 + which) * slots + slot for which in range(2)]
        factors = [scale[at] for scale in scales for at in of_scales]
        scores = jnp.zeros((len(wanted), tokens), jnp.float32)
        for index, own in enumerate(queries):  # Without latents there is one, and the second array is values alone.
            partly = jnp.dot(own, loaded[index].astype(own.dtype).T, preferred_element_type=jnp.float32)
            scores += partly * factors[index][None] if factors else partly
        distance = wanted[:, None] - at[None]
        visible = distance >= 0
        if window is not None:
            visible &= scoring.is_within(distance, wanted[:, None], window)
        scores = jnp.where(visible, scoring.of_products(scores), MASKED)
        total, weight, most = before
        now = jnp.maximum(most, jnp.max(scores, axis=1))
        weights, rescale = jnp.exp(scores - now[:, None]), jnp.exp(most - now)
        valued = 0 if is_latent else 1
        weighed = weights * factors[valued][None] if factors else weights
        added = jnp.dot(
            weighed.astype(query.dtype), loaded[valued].astype(query.dtype), preferred_element_type=jnp.float32
        )
        return total * rescale[:, None] + added, weight * rescale + jnp.sum(weights, axis=1), now

    count = wanted.shape[0]
    empty = (
        jnp.zeros((count, product.shape[1]), jnp.float32),
        jnp.zeros(count, jnp.float32),
        jnp.full(count, MASKED, jnp.float32),
    )
    # Pages past the newest token are not read.
    left = newest // page_size + 1 - first - split * blocks * entries
    read = jnp.clip((left + entries - 1) // entries, 0, blocks)
    product[...], sums[...], largest[...] = lax.fori_loop(0, read, block, empty)
