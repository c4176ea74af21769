"""Attention of new tokens over pages on TPUs, as a Pallas kernel that reads pages in place.

Without the kernel, XLA:TPU gathers a sequence's pages into one array and copies it into another layout (libtpu
0.0.42.1). JAX's own `ragged_paged_attention` needs keys and values interleaved in one array for each layer, and returns
no sums of weights, without which a page cannot be split over devices.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from meshwright.description.hlo.kernel_cost import KernelCost
from meshwright.execution.models.attention import Scoring
from meshwright.execution.models.generation.paged_cache import Pages, TokenSizes
from meshwright.execution.models.generation.query_sets import MASKED, Partial, QuerySets

BLOCK_TOKENS = 256
"""Tokens that a step of the grid reads: a DMA for each page and array, in flight while the step before is computed."""

MOST_ROWS = 256
"""The largest number of queries of a kv head in one step: enough to be bound by matmuls, not by reading pages."""

MOST_TABLE = 1 << 17
"""Entries of all page tables of a device, which are in its scalar memory of 1 MiB."""

_LANES = 128


def fits_tpu_kernel(slots: int, table_size: int) -> bool:
    """Whether the kernel can attend over pages on one device: not where pages fill no tile.

    slots: tokens of each page on the device. table_size: entries of the page tables of all rows on the device.
    """
    return slots % 8 == 0 and BLOCK_TOKENS % slots == 0 and table_size <= MOST_TABLE


def attend_to_pages_on_tpu(
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
    """Return what `paged_kernel.attend_to_pages` returns, of the same arguments."""
    batch, length, heads, group, width = query.shape
    slots, rank = pages.rows.shape[2], sizes.key if is_latent else sizes.value
    queries, tokens = length * group, table.shape[1] * slots
    sets = QuerySets(batch, heads, length, group, min(MOST_ROWS, -(-queries // 16) * 16))
    own = sets.arrays(query, rank, width - rank) if is_latent else sets.arrays(query, width)
    of_rows = sets.positions(positions)
    pages_read = BLOCK_TOKENS // slots
    blocks = math.ceil(table.shape[1] / pages_read)
    # Blocks past the newest token of a set are neither read nor computed; a row's first block always is.
    pages_needed = jnp.max(of_rows, axis=2) // page_size + 1 - first[None]
    needed = jnp.clip((pages_needed + pages_read - 1) // pages_read, 1, blocks)
    kernel = partial(
        _kernel,
        page_size=page_size,
        window=window,
        scoring=scoring,
        sizes=sizes,
        slots=slots,
        pages_read=pages_read,
        is_latent=is_latent,
    )
    arrays = [array for array in pages if array is not None]
    of_page = sum(array.dtype.itemsize * math.prod(array.shape[2:]) for array in arrays)
    read = of_page * batch * table.shape[1] * sets.parts
    written = 4 * batch * heads * sets.parts * sets.rows * (rank + 2 * _LANES)
    cost = KernelCost(2 * batch * heads * queries * tokens * (width + rank), read + written)
    call = _on_grid(kernel, sets, own, rank, arrays, pages_read, blocks, cost, is_interpreted=is_interpreted)
    with jax.named_scope(cost.scope):
        product, sums, largest = call(
            jnp.pad(table, ((0, 0), (0, blocks * pages_read - table.shape[1]))),
            needed,
            jnp.stack([jnp.asarray(one, jnp.int32) for one in (layer, offset)]),
            first,
            of_rows[..., None],
            *(array.reshape(heads, sets.parts, *array.shape[1:]) for array in own),
            *(array for array in arrays for _ in range(pages_read)),
        )
    return Partial(*(sets.by_token(x.reshape(-1, *x.shape[2:])) for x in (product, sums[..., 0], largest[..., 0])))


def _on_grid(
    kernel: Any,
    sets: QuerySets,
    queries: list[Array],
    width: int,
    arrays: list[Array],
    pages_read: int,
    blocks: int,
    cost: KernelCost,
    *,
    is_interpreted: bool,
) -> Any:
    """Return `pl.pallas_call` of a kernel on a grid of (rows of the batch, sets of queries, blocks of pages).

    Each page of a block is an operand, all of the same array, so that Pallas reads the next block's pages while this
    one is computed.

    width: size of a result. arrays: those of the pages.
    """
    from jax.experimental.pallas import tpu as pltpu  # Imported late: 0.2 s that only TPUs need.

    def of_set(*sizes: int) -> pl.BlockSpec:
        return pl.BlockSpec(
            (sets.heads, None, None, *sizes), lambda row, part, block, *_: (0, part, row, *(0 for _ in sizes))
        )

    def of_page(index: int, array: Array) -> pl.BlockSpec:
        def where(row: Any, part: Any, block: Any, table: Any, needed: Any, numbers: Any, _: Any) -> tuple[Any, ...]:
            # The same page again is not read again.
            read = jnp.minimum(block, needed[part, row] - 1)
            return numbers[0], table[row, read * pages_read + index], 0, 0

        return pl.BlockSpec((None, None, *array.shape[2:]), where)

    results = ((sets.rows, width), (sets.rows, _LANES), (sets.rows, _LANES))
    whole = (sets.heads, sets.parts, sets.batch)
    options: Any = {"interpret": True} if is_interpreted else {}
    return pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=4,
            grid=(sets.batch, sets.parts, blocks),
            in_specs=[
                pl.BlockSpec((None, None, sets.rows, 1), lambda row, part, block, *_: (part, row, 0, 0)),
                *(of_set(sets.rows, array.shape[-1]) for array in queries),
                *(of_page(index, array) for array in arrays for index in range(pages_read)),
            ],
            out_specs=[of_set(*sizes) for sizes in results],
        ),
        out_shape=[jax.ShapeDtypeStruct((*whole, *sizes), jnp.float32) for sizes in results],
        cost_estimate=pl.CostEstimate(flops=cost.flops, bytes_accessed=cost.num_bytes, transcendentals=0),
        name="paged_attention",
        **options,
    )


def _kernel(
    table: Any,
    needed: Any,
    numbers: Any,
    first: Any,
    positions: Any,
    *rest: Any,
    page_size: int,
    window: int | None,
    scoring: Scoring,
    sizes: TokenSizes,
    slots: int,
    pages_read: int,
    is_latent: bool,
) -> None:
    """Attend over one block of pages, and add to the results, which stay on the chip until the row's last block.

    Args:
        needed: blocks that each set and row reads [parts, b].
        numbers: [2]: the layer, which only the blocks' indices need, and `offset` of `attend_to_pages`.
        positions: positions of the queries [rows, 1]; -1 for padding.
        rest: queries [k, rows, h], with latents in two arrays; the rows of each page [slots, width]; with int8, the
            scales of each page [1, size]; the results (see `Partial`), of which sums and largest scores fill all lanes.
    """
    num_queries = 2 if is_latent else 1
    queries, product, sums, largest = rest[:num_queries], *rest[-3:]
    rows, scales = rest[num_queries:][:pages_read], rest[num_queries + pages_read : -3]
    row, part, block = (pl.program_id(axis) for axis in range(3))

    @pl.when(block == 0)
    def _() -> None:
        product[...], sums[...] = jnp.zeros(product.shape, jnp.float32), jnp.zeros(sums.shape, jnp.float32)
        largest[...] = jnp.full(largest.shape, MASKED, jnp.float32)

    @pl.when(block < needed[part, row])
    def _() -> None:
        wanted, tokens = positions[...], slots * pages_read
        places = lax.broadcasted_iota(jnp.int32, (1, tokens), 1)
        at = (first[row] + block * pages_read + places // slots) * page_size + numbers[1] + places % slots
        distance = wanted - at
        visible = distance >= 0
        if window is not None:
            visible &= scoring.is_within(distance, wanted, window)
        for head in range(sizes.heads):
            at = head * sizes.of_head
            columns = slice(at, at + sizes.key), slice(at + sizes.key, at + sizes.of_head)
            key, value = (_joined(rows, own, axis=0).astype(queries[0].dtype) for own in columns)
            begins = [(2 * head + which) * slots for which in range(2)] if scales else []
            factors = [_joined(scales, slice(begin, begin + slots), axis=1) for begin in begins]
            scores = _scores(queries[0][head], key, *factors[:1])
            if is_latent:
                scores += _scores(queries[1][head], value, *factors[1:])
            scores = jnp.where(visible, scoring.of_products(scores), MASKED)
            most = largest[head]
            now = jnp.maximum(most, jnp.max(scores, axis=1, keepdims=True))
            weights, rescale = jnp.exp(scores - now[:, :1]), jnp.exp(most - now)
            sums[head] = sums[head] * rescale + jnp.sum(weights, axis=1, keepdims=True)
            largest[head] = now
            valued = 0 if is_latent else 1
            weights = weights * factors[valued] if factors else weights
            added = jnp.dot(weights.astype(key.dtype), (key, value)[valued], preferred_element_type=jnp.float32)
            product[head] = product[head] * rescale[:, :1] + added


def _joined(pages: Any, columns: slice, axis: int) -> Array:
    """Return some columns of all pages of a block, joined along an axis."""
    return jnp.concatenate([page[:, columns] for page in pages], axis=axis)


def _scores(query: Array, keys: Array, factors: Array | None = None) -> Array:
    """Return the products [rows, tokens] in float32 of queries [rows, h] and keys [tokens, h], times `factors`."""
    products = lax.dot_general(query, keys, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
    return products if factors is None else products * factors
