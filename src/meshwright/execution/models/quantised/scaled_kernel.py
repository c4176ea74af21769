"""A matmul of few rows with weights in groups, for NVIDIA GPUs: a Pallas kernel that reads values in their own bits.

XLA:GPU would write the products of all groups, or a dequantized copy of the weight, to memory (JAX 0.10.2).
"""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from meshwright.execution.models.quantised.scaled import ScaledWeight
from meshwright.execution.runtime.experts.gpu_kernel import Take, Tile, multiply_in_tiles
from meshwright.planning.cost.rates.triton_rows import LEAST_ROWS, MOST_ROWS, padded_rows

FEW_ROWS, TILES = 16, (Tile(64, 128), Tile(64, 64, stages=2))
"""The tiles of stored values for up to that many rows, and for more: the fastest of thirty on an H200 (JAX 0.11.2)."""

PROGRAMS = 512
"""Number of programs of a call to aim at, about four for each processor of a GPU: groups are divided between them."""


def fits_scaled_kernel(size: int, weight: ScaledWeight) -> bool:
    """Whether the kernel can multiply blocks of `size` rows by weights."""
    return size <= MOST_ROWS and _inner(weight) >= LEAST_ROWS


def _inner(weight: ScaledWeight) -> int:
    """Return the rows of a tile of a weight, a power of 2 that divides those that are stored of a group."""
    return math.gcd(weight.values.shape[-2], TILES[0].inner)


def multiply_scaled_blocks(rows: Array, weights: ScaledWeight, blocks: Array, size: int, **options: Any) -> Array:
    """Return rows [m, d], sorted by expert, each multiplied by its expert's weight: [m, columns] in float32.

    weights: arrays [experts, groups, group, columns]. blocks, size, options: as in `multiply_blocks`.
    """
    from jax.experimental.pallas import triton  # Imported late: 0.1 s that only GPUs need.

    (num_groups, stored, columns), inner = weights.values.shape[1:], _inner(weights)
    tile = TILES[padded_rows(size) > FEW_ROWS]
    steps_of_group, group, is_packed = stored // inner, rows.shape[1] // num_groups, weights.values.dtype == jnp.uint8
    steps, tiles = num_groups * steps_of_group, -(-columns // tile.columns)
    # Partial sums are written and read once, and take no longer than reading 4-bit values.
    splits = max(1, min(steps, PROGRAMS // (blocks.shape[0] * tiles), rows.shape[1] // (16 * padded_rows(size))))

    def product(take: Take, values: Any, scale: Any, *rest: Any) -> Array:
        *zero, number, step, to = rest
        # Columns beyond the last are of no result, so what is read for them is not set.
        index, place = step // steps_of_group, step % steps_of_group * inner

        def of_columns(array: Any) -> Array:
            return triton.load(array.at[number, index, to], mask=to < columns)

        at = (number, index, (place + jnp.arange(inner))[:, None], to[None])
        codes = triton.load(values.at[at], mask=jnp.broadcast_to(to < columns, (inner, tile.columns)))
        parts = halves(codes, rows.dtype) if is_packed else [codes.astype(rows.dtype)]
        made = jnp.zeros((padded_rows(size), tile.columns), jnp.float32)
        for half, part in enumerate(parts):
            used = part - of_columns(zero[0]).astype(part.dtype)[None] if zero else part
            made += jnp.dot(
                take(index * group + half * stored + place, inner), used, preferred_element_type=jnp.float32
            )
        return made * of_columns(scale).astype(jnp.float32)[None]

    zeros = [] if weights.zero is None else [weights.zero[:, :, 0]]
    made = multiply_in_tiles(
        rows, [weights.values, weights.scale[:, :, 0], *zeros], blocks, product, size=size, steps=steps,
        columns=columns, dtype=jnp.float32, tile=tile, splits=splits, name="scaled_matmul", **options,
    )  # fmt: skip
    return jnp.sum(made, axis=0)


def halves(codes: Array, dtype: Any) -> list[Array]:
    """Return the two 4-bit values of bytes, in a float `dtype`, which represents them exactly."""
    if dtype != jnp.bfloat16:
        return [(((half.astype(jnp.int32) & 15) ^ 8) - 8).astype(dtype) for half in (codes, codes >> 4)]
    # A value is put into the mantissa of 128, where a unit is the last bit: no conversion of numbers.
    wide = codes.astype(jnp.uint16) ^ 0x88
    bits = (wide & 15, wide >> 4)
    return [lax.bitcast_convert_type(half | jnp.uint16(0x4300), dtype) - jnp.asarray(136, dtype) for half in bits]
