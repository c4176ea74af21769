"""A grouped matmul of few rows for NVIDIA GPUs, as a Pallas kernel that reads each expert's weights in place.

A decode step multiplies few rows by each expert's weights, so reading the weights takes all of its time. In a loop over
blocks of rows, XLA:GPU would copy an expert's weights for each block before it multiplies them.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from meshwright.execution.runtime.triton_rows import MOST_ROWS, padded_rows

INNER, COLUMNS = 64, 128
"""Shape of the tile of a weight that is read at once. On an H200 it reads 3.7 of 4.8 TB/s, the most of ten shapes."""


def fits_kernel(size: int, weights: Array) -> bool:
    """Whether the kernel can multiply blocks of `size` rows by weights [experts, d, f]."""
    return size <= MOST_ROWS and jnp.issubdtype(weights.dtype, jnp.floating)


def multiply_blocks(rows: Array, weights: Array, expert: Array, is_needed: Array, dtype: Any, **options: Any) -> Array:
    """Return blocks of rows [n, size, d], each multiplied by the weights [experts, d, f] of its expert: [n, size, f].

    expert: expert of each block [n]. is_needed: whether a block is computed [n]; results of others are undefined.
    options: arguments for `pallas_call` instead of the default compiler parameters.
    """
    from jax.experimental.pallas import triton  # Imported late: 0.1 s that only GPUs need.

    (count, size, inner), columns = rows.shape, weights.shape[2]
    height, steps, tiles = padded_rows(size), -(-inner // INNER), -(-columns // COLUMNS)

    def kernel(expert: Any, is_needed: Any, rows: Any, weights: Any, result: Any) -> None:
        number, to = expert[...], pl.program_id(1) * COLUMNS + jnp.arange(COLUMNS)

        def part(step: Array) -> Array:
            """Return a tile of the weight [INNER, COLUMNS], with zeros beyond the weight's edges."""
            at = step * INNER + jnp.arange(INNER)
            is_inside = (at < inner)[:, None] & (to < columns)[None]
            return triton.load(weights.at[number, at[:, None], to[None]], mask=is_inside, other=0)

        def add(step: Array, total: Array) -> Array:
            ours = rows[:, pl.ds(step * INNER, INNER)]
            return total + jnp.dot(ours, part(step), preferred_element_type=jnp.float32)

        @pl.when(is_needed[...] != 0)
        def _() -> None:
            total = lax.fori_loop(0, steps, add, jnp.zeros((height, COLUMNS), jnp.float32))
            result[...] = total.astype(result.dtype)

    def of_block(*sizes: int) -> pl.BlockSpec:
        return pl.BlockSpec((None, *sizes), lambda block, column: (block, *(0 for _ in sizes)))

    # The result varies over the mesh axes that rows or weights vary over.
    varying = jax.typeof(rows[0, 0, 0] * weights[0, 0, 0]).manual_axis_type
    found = pl.pallas_call(
        kernel,
        grid=(count, tiles),
        in_specs=[of_block(), of_block(), of_block(height, steps * INNER), pl.BlockSpec()],
        out_specs=pl.BlockSpec((None, height, COLUMNS), lambda block, column: (block, 0, column)),
        out_shape=jax.ShapeDtypeStruct((count, height, tiles * COLUMNS), dtype, manual_axis_type=varying),
        name="grouped_matmul",
        **options or {"compiler_params": triton.CompilerParams(num_warps=4, num_stages=4)},
    )(
        expert.astype(jnp.int32),
        is_needed.astype(jnp.int32),
        jnp.pad(rows, ((0, 0), (0, height - size), (0, steps * INNER - inner))),
        weights,
    )
    return found[:, :size, :columns]
