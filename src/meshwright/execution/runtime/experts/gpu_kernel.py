"""Matmuls of few rows for NVIDIA GPUs, as Pallas kernels that read weights, and the rows of each block, in place.

A decode step multiplies few rows by each weight, so reading the weights takes all of its time. In a loop over blocks of
rows, XLA:GPU would copy an expert's weights for each block before it multiplies them. Where it gathered rows into
blocks and scattered their products, that took 0.7 of the 2.9 ms of two layers of DeepSeek-V2 on an H200 (JAX 0.11.2).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from meshwright.planning.cost.rates.triton_rows import MOST_ROWS, padded_rows


class Tile(NamedTuple):
    """Parameters of a kernel: the part of a weight that is read at once, and how its loads are spread.

    inner, columns: rows and columns of that part. stages: parts whose loads are under way at once.
    """

    inner: int
    columns: int
    warps: int = 4
    stages: int = 4


TILE = Tile(64, 128)
"""The tile of a weight in half precision. On an H200 it reads 3.7 of 4.8 TB/s, the most of ten shapes."""


def fits_kernel(size: int, weights: Array) -> bool:
    """Whether the kernel can multiply blocks of `size` rows by weights [experts, d, f]."""
    return size <= MOST_ROWS and jnp.issubdtype(weights.dtype, jnp.floating)


def multiply_blocks(rows: Array, weights: Array, blocks: Array, size: int, dtype: Any, **options: Any) -> Array:
    """Return rows [m, d], sorted by expert, each multiplied by its expert's weight [experts, d, f]: [m, f] in `dtype`.

    blocks: [n, 3]: each block's expert, first row, and the row after its last; at most `size` rows. Rows of no block
    are undefined. options: arguments for `pallas_call` instead of the default compiler parameters.
    """
    from jax.experimental.pallas import triton  # Imported late: 0.1 s that only GPUs need.

    inner, columns = weights.shape[1:]

    def product(take: Take, weights: Any, number: Array, step: Array, to: Array) -> Array:
        at = step * TILE.inner + jnp.arange(TILE.inner)
        is_inside = (at < inner)[:, None] & (to < columns)[None]
        part = triton.load(weights.at[number, at[:, None], to[None]], mask=is_inside, other=0)
        return jnp.dot(take(step * TILE.inner, TILE.inner), part, preferred_element_type=jnp.float32)

    made = multiply_in_tiles(
        rows, [weights], blocks, product, size=size, steps=-(-inner // TILE.inner), columns=columns, dtype=dtype,
        tile=TILE, name="grouped_matmul", **options,
    )  # fmt: skip
    return made[0]


Take = Callable[[Any, int], Array]
"""Called with the first dim and the number of dims; returns these dims of a block's rows."""


def multiply_in_tiles(
    rows: Array,
    weights: list[Array],
    blocks: Array,
    product: Callable[..., Array],
    *,
    size: int,
    steps: int,
    columns: int,
    dtype: Any,
    tile: Tile,
    name: str,
    splits: int = 1,
    **options: Any,
) -> Array:
    """Return the sums over steps of `product`, of each block's rows by each tile of columns: [splits, m, columns].

    Args:
        rows, blocks, size, options: as in `multiply_blocks`.
        weights: arrays that `product` reads.
        product: called with a `Take`, the arrays, the block's expert, the step and the tile's columns; returns
            [rows of a block, tile.columns] in float32.
        steps: number of steps.
        splits: number of programs over which the steps of a tile are divided, each with a sum of its own.
    """
    from jax.experimental.pallas import triton  # Imported late: 0.1 s that only GPUs need.

    (num_rows, inner), height = rows.shape, padded_rows(size)
    tiles, each = -(-columns // tile.columns), -(-steps // splits)

    def kernel(block: Any, rows: Any, *rest: Any) -> None:
        *arrays, result = rest
        number, start, end = block[0], block[1], block[2]
        own = start + jnp.arange(height)
        to = pl.program_id(1) * tile.columns + jnp.arange(tile.columns)
        split = pl.program_id(2)
        first = split * each

        def take(offset: Any, count: int) -> Array:
            at = offset + jnp.arange(count)
            is_inside = (own < end)[:, None] & (at < inner)[None]
            return triton.load(rows.at[own[:, None], at[None]], mask=is_inside, other=0)

        def add(step: Array, total: Array) -> Array:
            return total + product(take, *arrays, number, step, to)

        @pl.when(start < end)
        def _() -> None:
            zeros = jnp.zeros((height, tile.columns), jnp.float32)
            total = lax.fori_loop(first, jnp.minimum(first + each, steps), add, zeros)
            is_inside = (own < end)[:, None] & (to < columns)[None]
            triton.store(result.at[split, own[:, None], to[None]], total.astype(result.dtype), mask=is_inside)

    # The result varies over the mesh axes that rows or weights vary over.
    elements = (array[(0,) * array.ndim].astype(jnp.float32) for array in (rows, *weights))
    varying = jax.typeof(sum(elements)).manual_axis_type
    of_triton = triton.CompilerParams(num_warps=tile.warps, num_stages=tile.stages)
    return pl.pallas_call(
        kernel,
        grid=(blocks.shape[0], tiles, splits),
        in_specs=[
            pl.BlockSpec((None, 4), lambda block, column, split: (block, 0)),
            *[pl.BlockSpec()] * (1 + len(weights)),
        ],
        out_specs=pl.BlockSpec(),
        out_shape=jax.ShapeDtypeStruct((splits, num_rows, columns), dtype, manual_axis_type=varying),
        name=name,
        **options or {"compiler_params": of_triton},
        # Triton's arrays have sizes of powers of 2.
    )(jnp.pad(blocks.astype(jnp.int32), ((0, 0), (0, 1))), rows, *weights)
