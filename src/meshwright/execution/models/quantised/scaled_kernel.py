"""A matmul of few rows with weights in groups, for NVIDIA GPUs: a Pallas kernel that reads values in their own bits.

XLA:GPU would write the products of all groups, or a dequantized copy of the weight, to memory (JAX 0.10.2).
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from meshwright.execution.models.quantised.scaled import ScaledWeight
from meshwright.execution.runtime.triton_rows import LEAST_ROWS, MOST_ROWS, padded_rows

COLUMNS = 64
"""Columns of a tile of the result."""

PROGRAMS = 256
"""Number of programs of a call to aim at, about two for each processor of a GPU: groups are divided between them."""


def fits_scaled_kernel(size: int, weight: ScaledWeight) -> bool:
    """Whether the kernel can multiply blocks of `size` rows by weights: not those of a single group, which XLA can."""
    num_groups, half = weight.values.shape[-3:-1]
    return num_groups > 1 and size <= MOST_ROWS and half >= LEAST_ROWS and not half & (half - 1)


def multiply_scaled_blocks(
    rows: Array, weights: ScaledWeight, expert: Array, is_needed: Array, **options: Any
) -> Array:
    """Return blocks of rows [n, size, d], each multiplied by the weights of its expert: [n, size, columns] in float32.

    weights: arrays [experts, groups, group, columns]. expert: expert of each block [n]. is_needed: whether a block is
    computed [n]; results of others are undefined. options: arguments for `pallas_call` instead of the default compiler
    parameters.
    """
    from jax.experimental.pallas import triton  # Imported late: 0.1 s that only GPUs need.

    (count, size, inputs), (num_groups, half, columns) = rows.shape, weights.values.shape[1:]
    height, tiles, group = padded_rows(size), -(-columns // COLUMNS), inputs // num_groups
    # Partial sums are written and read once, and take no longer than reading 4-bit values.
    splits = max(1, min(num_groups, PROGRAMS // (count * tiles), inputs // (16 * height)))
    each, has_zero = -(-num_groups // splits), weights.zero is not None

    def kernel(expert: Any, is_needed: Any, rows: Any, values: Any, scale: Any, *rest: Any) -> None:
        *zero, result = rest
        number, to, first = expert[...], pl.program_id(1) * COLUMNS + jnp.arange(COLUMNS), pl.program_id(2) * each

        def of_columns(array: Any, index: Array) -> Array:
            return triton.load(array.at[number, index, to], mask=to < columns, other=0)

        def add(index: Array, total: Array) -> Array:
            at = (number, index, jnp.arange(half)[:, None], to[None])
            stored = triton.load(values.at[at], mask=jnp.broadcast_to(to < columns, (half, COLUMNS)), other=0)
            parts = [stored]
            if stored.dtype == jnp.uint8:
                wide = stored.astype(jnp.int32)
                parts = [((codes & 15) ^ 8) - 8 for codes in (wide, wide >> 4)]
            product = jnp.zeros_like(total)
            for place, part in enumerate(parts):
                ours = rows[:, pl.ds(index * group + place * half, half)]
                used = part.astype(jnp.float32)
                if zero:
                    used -= of_columns(zero[0], index).astype(jnp.float32)[None]
                product += jnp.dot(ours, used.astype(ours.dtype), preferred_element_type=jnp.float32)
            return total + product * of_columns(scale, index).astype(jnp.float32)[None]

        @pl.when(is_needed[...] != 0)
        def _() -> None:
            last = jnp.minimum(first + each, num_groups)
            result[...] = lax.fori_loop(first, last, add, jnp.zeros((height, COLUMNS), jnp.float32))

    def of_block(*sizes: int) -> pl.BlockSpec:
        return pl.BlockSpec((None, *sizes), lambda block, column, split: (block, *(0 for _ in sizes)))

    # The result varies over the mesh axes that rows or weights vary over.
    varying = jax.typeof(rows[0, 0, 0] * weights.scale[0, 0, 0, 0].astype(rows.dtype)).manual_axis_type
    found = pl.pallas_call(
        kernel,
        grid=(count, tiles, splits),
        in_specs=[of_block(), of_block(), of_block(height, inputs), *(pl.BlockSpec(),) * (2 + has_zero)],
        out_specs=pl.BlockSpec((None, None, height, COLUMNS), lambda block, column, split: (block, split, 0, column)),
        out_shape=jax.ShapeDtypeStruct((count, splits, height, tiles * COLUMNS), jnp.float32, manual_axis_type=varying),
        name="scaled_matmul",
        **options or {"compiler_params": triton.CompilerParams(num_warps=4, num_stages=4)},
    )(
        expert.astype(jnp.int32),
        is_needed.astype(jnp.int32),
        jnp.pad(rows, ((0, 0), (0, height - size), (0, 0))),
        weights.values,
        weights.scale[:, :, 0],
        *([weights.zero[:, :, 0]] if has_zero else []),
    )
    return jnp.sum(found, axis=1)[:, :size, :columns]
