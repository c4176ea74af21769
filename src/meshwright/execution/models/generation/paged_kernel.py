"""Attention of a few new tokens over pages on NVIDIA GPUs, as a Pallas kernel that reads each page once, in place.

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
from meshwright.execution.models.generation.paged_cache import Pages
from meshwright.execution.runtime.triton_rows import MOST_ROWS, padded_rows

BLOCK_TOKENS = 64
"""Tokens that a program of the grid reads in one iteration of its loop."""

BUSY_PROGRAMS = 1024
"""Programs that keep a GPU busy: about 8 for each of an H100's 132 multiprocessors."""

_MASKED = -1e30
"""Score of a key that a query does not attend to: finite, so that the difference of two such scores is not NaN."""


class Partial(NamedTuple):
    """Attention over some of the keys, to be combined with the results for the other keys; all float32.

    product: values [..., h] summed with weights exp(score - largest). sums: sums of these weights [...]. largest: the
    largest score of each query [...].
    """

    product: Array
    sums: Array
    largest: Array


def fits_kernel(queries: int, pages: Pages, slots: int) -> bool:
    """Whether the kernel can attend over `pages` on one device.

    False for more than `MOST_ROWS` queries (chunks of prompts, which are bound by matmuls), for more than
    `BLOCK_TOKENS` slots, for sizes that are not powers of 2 (Triton), and for arrays of 2^31 to 2^32 one-byte elements:
    Pallas indexes arrays of up to 4 GiB with signed 32-bit integers, which overflow there (JAX 0.10.2 to 0.12).

    queries: number of queries that share a kv head, in each row of the batch. slots: tokens of each page on the device.
    """
    small = pages.key.dtype.itemsize > 1 or pages.key.size < 1 << 31 or pages.key.size > 1 << 32
    return queries <= MOST_ROWS and slots <= BLOCK_TOKENS and all(map(_is_power, (slots, pages.key.shape[4]))) and small


def attend_to_pages(
    query: Array,
    positions: Array,
    pages: Pages,
    layer: Array,
    table: Array,
    first: Array,
    *,
    offset: Array | int,
    page_size: int,
    window: int | None,
    scoring: Scoring,
    is_interpreted: bool = False,
) -> Partial:
    """Return attention of queries [b, s, k, g, h] at positions [b, s] over the pages of one device, as a `Partial`.

    Call it inside `jax.shard_map` without `check_vma`. The arrays of the result are [b, s, k, g, ...].

    Args:
        pages: keys and values [layers, pages, k, slots, h], with the slots of each page that this device has.
        layer: index of the layer in the pages.
        table, first: as in `PagedCache`, [b, entries] and [b].
        offset: the index, among all slots of a page, of this device's first slot.
        page_size: tokens of a page over all devices that share it.
        is_interpreted: run in Pallas's interpreter, slowly, on a CPU.
    """
    batch, length, heads, group, head_dim = query.shape
    slots, tokens, queries = pages.key.shape[3], table.shape[1] * pages.key.shape[3], length * group
    rows = padded_rows(queries)
    work = _divided(table.shape[1], slots, batch * heads)

    def padded(x: Array, value: int = 0) -> Array:
        """Pad the dim before the last with `value`, from `queries` to `rows`."""
        return jnp.pad(x, [(0, 0)] * (x.ndim - 2) + [(0, rows - queries), (0, 0)], constant_values=value)

    of_heads = jnp.moveaxis(query, 2, 1).reshape(batch, heads, queries, head_dim)
    of_rows = padded(jnp.repeat(positions, group, axis=1)[..., None], -1)[..., 0]
    numbers = [jnp.broadcast_to(jnp.asarray(one, jnp.int32), batch) for one in (first, layer, offset, 0)]
    # Merge layers, pages, heads and slots into one dim, without a copy.
    arrays = [array.reshape(-1, head_dim) for array in pages[:2]] + [scale.reshape(-1) for scale in pages.scales or ()]
    read = sum(array.dtype.itemsize * math.prod(array.shape[1:]) for array in arrays) * batch * heads * tokens
    written = 4 * batch * heads * work.splits * rows * (head_dim + 2)
    kernel = partial(
        _kernel,
        page_size=page_size,
        window=window,
        scoring=scoring,
        num_pages=pages.key.shape[1],
        slots=slots,
        blocks=work.blocks,
        entries=work.entries,
    )
    call = _on_grid(kernel, (batch, heads), work, (rows, head_dim), len(arrays), is_interpreted=is_interpreted)
    with jax.named_scope(KernelCost(4 * query.size * tokens, read + written).scope):
        product, sums, largest = call(
            jnp.stack(numbers, axis=1),
            of_rows,
            jnp.pad(table, ((0, 0), (0, work.total - table.shape[1]))),
            padded(of_heads),
            *arrays,
        )
    most = jnp.max(largest, axis=2, keepdims=True)
    weights = jnp.exp(largest - most)

    def by_token(x: Array) -> Array:
        """Reshape [b, k, rows, ...] to [b, s, k, g, ...]."""
        return jnp.moveaxis(x[:, :, :queries].reshape(batch, heads, length, group, *x.shape[3:]), 1, 2)

    return Partial(
        by_token(jnp.sum(product * weights[..., None], axis=2)),
        by_token(jnp.sum(sums * weights, axis=2)),
        by_token(most[:, :, 0]),
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


def _divided(pages: int, slots: int, groups: int) -> _Work:
    """Return how `pages` pages of `slots` tokens are divided, for each of `groups` combinations of row and kv head."""
    entries = BLOCK_TOKENS // slots
    blocks = math.ceil(pages / entries)
    of_split = math.ceil(blocks / min(blocks, max(1, BUSY_PROGRAMS // groups)))
    return _Work(math.ceil(blocks / of_split), of_split, entries)


def _on_grid(
    kernel: Any,
    grid: tuple[int, int],
    work: _Work,
    sizes: tuple[int, int],
    num_arrays: int,
    *,
    is_interpreted: bool,
) -> Any:
    """Return `pl.pallas_call` of a kernel on a grid of (rows, kv heads, splits).

    Args:
        grid: numbers of rows and of kv heads.
        sizes: number of queries of a row and kv head (padded), and head dim.
        num_arrays: number of arrays of the cache, which programs index themselves instead of in blocks.
    """
    from jax.experimental.pallas import triton  # Imported late: 0.1 s that only GPUs need.

    def of_row(*sizes: int) -> pl.BlockSpec:
        return pl.BlockSpec((None, *sizes), lambda row, head, split: (row, *(0 for _ in sizes)))

    def of_split(*sizes: int) -> pl.BlockSpec:
        return pl.BlockSpec(
            (None, None, None, *sizes), lambda row, head, split: (row, head, split, *(0 for _ in sizes))
        )

    rows, _ = sizes
    results, of_triton = (sizes, (rows,), (rows,)), triton.CompilerParams(num_warps=4, num_stages=3)
    options: Any = {"interpret": True} if is_interpreted else {"compiler_params": of_triton}
    of_head = pl.BlockSpec((None, None, *sizes), lambda row, head, split: (row, head, 0, 0))
    return pl.pallas_call(
        kernel,
        grid=(*grid, work.splits),
        in_specs=[of_row(4), of_row(rows), of_row(work.total), of_head, *(pl.BlockSpec() for _ in range(num_arrays))],
        out_specs=[of_split(*own) for own in results],
        out_shape=[jax.ShapeDtypeStruct((*grid, work.splits, *own), jnp.float32) for own in results],
        name="paged_attention",
        **options,
    )


def _kernel(
    starts: Any,
    positions: Any,
    table: Any,
    query: Any,
    key: Any,
    value: Any,
    *rest: Any,
    page_size: int,
    window: int | None,
    scoring: Scoring,
    num_pages: int,
    slots: int,
    blocks: int,
    entries: int,
) -> None:
    """Attend over the pages of one split: `blocks` blocks of `entries` pages each.

    Args:
        starts: [4]: the row's `PagedCache.first`, the layer, `offset` of `attend_to_pages`, an unused entry.
        positions: positions of the queries; -1 for padding.
        rest: the scales of int8 keys and values, if any, then the three results (see `Partial`).
    """
    *scales, product, sums, largest = rest
    head, split = pl.program_id(1), pl.program_id(2)
    first, layer, offset = starts[0], starts[1], starts[2]
    tokens = entries * slots
    wanted, own_query = positions[...], query[...]
    newest = jnp.max(wanted)

    def block(number: Array, before: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        begin = (split * blocks + number) * entries
        places = jnp.arange(tokens)
        at = (first + begin + places // slots) * page_size + offset + places % slots
        pages = table[begin + places // slots]
        stored = ((layer * num_pages + pages) * pl.num_programs(1) + head) * slots + places % slots
        keys, values, *factors = (array[stored] for array in (key, value, *scales))
        scores = jnp.dot(own_query, keys.astype(own_query.dtype).T, preferred_element_type=jnp.float32)
        scores = (scores * factors[0][None] if factors else scores) / scoring.divisor
        if scoring.softcap:
            scores = scoring.softcap * jnp.tanh(scores / scoring.softcap)
        distance = wanted[:, None] - at[None]
        visible = distance >= 0
        if window is not None:
            visible &= scoring.is_within(distance, wanted[:, None], window)
        scores = jnp.where(visible, scores, _MASKED)
        total, weight, most = before
        now = jnp.maximum(most, jnp.max(scores, axis=1))
        weights, rescale = jnp.exp(scores - now[:, None]), jnp.exp(most - now)
        weighed = weights * factors[1][None] if factors else weights
        added = jnp.dot(
            weighed.astype(own_query.dtype), values.astype(own_query.dtype), preferred_element_type=jnp.float32
        )
        return total * rescale[:, None] + added, weight * rescale + jnp.sum(weights, axis=1), now

    rows = wanted.shape[0]
    empty = (
        jnp.zeros((rows, key.shape[1]), jnp.float32),
        jnp.zeros(rows, jnp.float32),
        jnp.full(rows, _MASKED, jnp.float32),
    )
    # Pages past the newest token are not read.
    left = newest // page_size + 1 - first - split * blocks * entries
    read = jnp.clip((left + entries - 1) // entries, 0, blocks)
    product[...], sums[...], largest[...] = lax.fori_loop(0, read, block, empty)


def _is_power(size: int) -> bool:
    """Whether a size is a power of 2."""
    return size & (size - 1) == 0
