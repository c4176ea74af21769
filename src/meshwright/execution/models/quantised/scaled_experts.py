"""Grouped matmuls of a server's experts on one device, whose weights are in int8, int4 or fp8 with scales."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array, lax

from meshwright.execution.models.quantised.scaled import ScaledWeight, dequantised, rows_product
from meshwright.execution.runtime.experts.products import expert_of_rows, multiply_in_blocks
from meshwright.execution.runtime.mesh import mesh_platform
from meshwright.execution.runtime.shards import match_varying

MOST_MASKED_ROWS = 512
"""Rows up to which a TPU multiplies every row with all experts, which reads weights once, in their own bits.

More rows are multiplied with a dequantized copy: computing them all would take longer than writing and reading it.
"""


def scaled_expert_product(rows: Array, weights: ScaledWeight, sizes: Array | None) -> Array:
    """Return each row multiplied by its expert's weight, in the rows' dtype.

    Rows are [m, d], sorted by expert, or [experts, slots, d] if `sizes` is None; those after sum(sizes) are undefined.

    weights: arrays [experts, groups, group, columns]. sizes: the number of rows of each expert.
    """
    if sizes is None:
        return jax.vmap(lambda own, weight: rows_product(own, weight, rows.dtype))(rows, weights)
    if mesh_platform() != "tpu":
        return multiply_in_blocks(rows, weights, sizes, dtype=rows.dtype, multiply=rows_product)
    if rows.shape[0] <= MOST_MASKED_ROWS:
        return masked_product(rows, weights, sizes)
    whole = dequantised(weights, rows.dtype)
    whole = whole.reshape(whole.shape[0], -1, whole.shape[-1])
    return lax.ragged_dot(*match_varying(rows, whole), sizes, preferred_element_type=rows.dtype)


def masked_product(rows: Array, weights: ScaledWeight, sizes: Array) -> Array:
    """Return `scaled_expert_product` as one matmul, in which each expert is a part of the inputs.

    A row [d] becomes [experts, d], with zeros for all experts but its own.
    """
    count = sizes.shape[0]
    is_own = expert_of_rows(rows.shape[0], sizes)[:, None] == jnp.arange(count)[None]
    wide = jnp.where(is_own[..., None], rows[:, None], 0)

    def merged(array: Array) -> Array:
        return array.reshape(-1, *array.shape[2:])

    return rows_product(wide.reshape(rows.shape[0], -1), jax.tree.map(merged, weights), rows.dtype)
