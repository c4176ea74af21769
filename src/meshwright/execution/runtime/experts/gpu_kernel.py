"""A grouped matmul of few rows for NVIDIA GPUs: a Pallas kernel that reads each expert's weights where they lie.

A server's decode step multiplies few rows of each expert, so that reading the weights takes all of its time. In a loop
over blocks of rows XLA:GPU would copy an expert's weights for each block before it multiplies them.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

LEAST_ROWS, MOST_ROWS = 16, 64
"""Rows of a block: Triton's smallest matmul, and the largest that is still bound by reading its weights."""

INNER, COLUMNS = 64, 128
"""The largest tile of a weight that is read at once."""


def fits_kernel(size: int, weights: Array) -> bool:
    """Return whether the kernel takes blocks of `size` rows with weights [experts, d, f]."""
    tiles = [_tile(count, most) for count, most in zip(weights.shape[1:], (INNER, COLUMNS), strict=True)]
    return size <= MOST_ROWS and min(tiles) >= LEAST_ROWS and jnp.issubdtype(weights.dtype, jnp.floating)


def multiply_blocks(rows: Array, weights: Array, expert: Array, is_needed: Array, dtype: Any, **options: Any) -> Array:
    """Multiply blocks of rows [n, size, d], each with the weights [experts, d, f] of its expert [n]; [n, size, f].

    Blocks that are not needed are left undefined. options: of `pallas_call`.
    """
    count, size, inner = rows.shape
    columns, height = weights.shape[2], max(LEAST_ROWS, 1 << (size - 1).bit_length())
    depth, width = _tile(inner, INNER), _tile(columns, COLUMNS)

    def kernel(expert: Any, is_needed: Any, rows: Any, weights: Any, result: Any) -> None:
        number, begin = expert[...], pl.program_id(1) * width

        @pl.when(is_needed[...] != 0)
        def _() -> None:

            def add(step: Array, total: Array) -> Array:
                at = pl.ds(step * depth, depth)
                part = weights[number, at, pl.ds(begin, width)]
                return total + jnp.dot(rows[:, at], part, preferred_element_type=jnp.float32)

            total = lax.fori_loop(0, inner // depth, add, jnp.zeros((height, width), jnp.float32))
            result[...] = total.astype(result.dtype)

    def of_block(*sizes: int) -> pl.BlockSpec:
        return pl.BlockSpec((None, *sizes), lambda block, column: (block, *(0 for _ in sizes)))

    # Results differ between the devices between which rows or weights do.
    varying = jax.typeof(rows[0, 0, 0] * weights[0, 0, 0]).manual_axis_type
    found = pl.pallas_call(
        kernel,
        grid=(count, columns // width),
        in_specs=[of_block(), of_block(), of_block(height, inner), pl.BlockSpec()],
        out_specs=pl.BlockSpec((None, height, width), lambda block, column: (block, 0, column)),
        out_shape=jax.ShapeDtypeStruct((count, height, columns), dtype, manual_axis_type=varying),
        name="grouped_matmul",
        **options or {"compiler_params": _triton_options()},
    )(
        expert.astype(jnp.int32),
        is_needed.astype(jnp.int32),
        jnp.pad(rows, ((0, 0), (0, height - size), (0, 0))),
        weights,
    )
    return found[:, :size]


def _triton_options() -> Any:
    from jax.experimental.pallas import triton

    return triton.CompilerParams(num_warps=4, num_stages=4)


def _tile(size: int, most: int) -> int:
    """Return the largest power of 2 up to `most` that divides a size."""
    return min(most, size & -size)
