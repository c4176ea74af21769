"""Matmuls of a server that read weights with scales, of layers and of experts, on one device each.

Values are read from HBM in their own bits. For a single group XLA scales the products; for several, XLA:TPU scales
values as it multiplies them, if groups are a dim of the matmul; on NVIDIA GPUs there is a kernel (`scaled_kernel`).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec as P

from meshwright.description.hlo.kernel_cost import KernelCost
from meshwright.description.step.token_routing import expert_blocks
from meshwright.execution.models.quantised.scaled import ScaledWeight, dequantised, local_sizes, specs, unpacked
from meshwright.execution.models.quantised.scaled_kernel import fits_scaled_kernel, multiply_scaled_blocks
from meshwright.execution.runtime.experts.products import expert_of_rows, multiply_in_blocks, multiply_row_blocks
from meshwright.execution.runtime.mesh import mesh_platform
from meshwright.execution.runtime.sharding_context import ShardingContext
from meshwright.execution.runtime.shards import match_varying, on_shards

MOST_GROUPED_ROWS = 8
"""Rows up to which a TPU scales the products of several groups instead of values.

By libtpu's cycles for a v5e, a matmul [rows, 4096] @ [4096, 14336] in groups of 128 takes 69k so and 95k otherwise for
8 rows, 307k and 139k for 64; for 256 scaled values take 1.04 times as long as bf16 (libtpu 0.0.42.1).
"""

MOST_MASKED_ROWS = 512
"""Rows up to which a TPU multiplies every row with all experts: weights are read once.

More rows are multiplied with a dequantized copy: computing them all would take longer than writing and reading it.
"""


def scaled_product(x: Array, weight: ScaledWeight, layout: ShardingContext, *, dtype: Any, out: P) -> Array:
    """Multiply x [b, s, *inputs] by one layer's weight, in `dtype` and with the spec `out`.

    `out` is unreduced over the mesh axes that split the inputs.
    """
    sums, sizes = tuple(out.unreduced), local_sizes(weight.outputs, layout)

    def local(x: Array, weight: ScaledWeight) -> Array:
        made = matrix_product(x.reshape(x.shape[0] * x.shape[1], -1), weight, dtype)
        made = made.reshape(*x.shape[:2], *sizes)
        return jax.lax.pcast(made, sums, to="unreduced") if sums else made

    read = layout.spec("batch", "sequence", *(name for name, _ in weight.inputs))
    return on_shards(local, layout, in_specs=(read, specs(weight)), out_specs=out)(jax.reshard(x, read), weight)


def matrix_product(rows: Array, weight: ScaledWeight, dtype: Any) -> Array:
    """Multiply rows [m, inputs] by one matrix of a device, which gives [m, columns] in `dtype`; sums are in float32.

    On GPUs many rows are multiplied with a dequantized copy, if the weight has several groups. A weight of one group is
    multiplied by XLA: on an H200 its fusion takes 35 us for 64 rows by [4096, 14336] in int8 or fp8, and the kernel at
    least 54. Of experts XLA would copy each weight first (`scaled_expert_product`).
    """
    (count, inputs), (num_groups, _, columns), platform = rows.shape, weight.scale.shape, mesh_platform()
    if num_groups == 1 or platform == "cpu" or (platform == "tpu" and count <= MOST_GROUPED_ROWS):
        return group_products(rows, weight, dtype)
    if platform == "tpu" or not fits_scaled_kernel(count, weight):
        cut, values = rows.reshape(count, num_groups, -1), dequantised(weight, rows.dtype)
        return jnp.einsum("mgi,gin->mn", cut, values, preferred_element_type=dtype)
    moved = count * (inputs * rows.dtype.itemsize + 4 * columns) + _nbytes(weight)
    with jax.named_scope(KernelCost(2 * count * inputs * columns, moved, weights=inputs * columns).scope):
        one = jax.tree.map(lambda array: array[None], weight)
        return multiply_scaled_blocks(rows, one, jnp.array([[0, 0, count]]), count).astype(dtype)


def _nbytes(weight: ScaledWeight) -> int:
    return sum(array.size * array.dtype.itemsize for array in jax.tree.leaves(weight))


def group_products(rows: Array, weight: ScaledWeight, dtype: Any) -> Array:
    """Return `matrix_product` as products of groups, which are scaled and summed."""
    num_groups = weight.scale.shape[0]
    cut = rows.reshape(rows.shape[0], num_groups, -1)
    values = unpacked(weight.values).astype(rows.dtype)
    parts = jnp.einsum("mgi,gin->gmn", cut, values, preferred_element_type=jnp.float32)
    scale = weight.scale.astype(jnp.float32)
    made = jnp.sum(parts * scale, axis=0)
    if weight.zero is not None:
        sums = jnp.sum(cut, axis=-1, dtype=jnp.float32)
        made -= jnp.einsum("mg,gn->mn", sums, (scale * weight.zero.astype(jnp.float32))[:, 0])
    return made.astype(dtype)


def scaled_expert_product(rows: Array, weights: ScaledWeight, sizes: Array | None) -> Array:
    """Return each row multiplied by its expert's weight, in the rows' dtype.

    Rows are [m, d], sorted by expert, or [experts, slots, d] if `sizes` is None; those after sum(sizes) are undefined.

    weights: arrays [experts, groups, group, columns]. sizes: the number of rows of each expert.
    """
    if sizes is None:
        return jax.vmap(lambda own, weight: group_products(own, weight, rows.dtype))(rows, weights)
    platform, (num_experts, _, _, columns) = mesh_platform(), weights.scale.shape
    if platform == "tpu" and rows.shape[0] <= MOST_MASKED_ROWS:
        return masked_product(rows, weights, sizes)
    if platform == "tpu":
        whole = dequantised(weights, rows.dtype).reshape(num_experts, -1, columns)
        rows, whole = match_varying(rows, whole)
        return lax.ragged_dot(rows, whole, sizes, preferred_element_type=rows.dtype)
    _, size = expert_blocks(rows.shape[0], num_experts)
    if platform == "gpu" and fits_scaled_kernel(size, weights):
        read = _nbytes(weights) * min(1, rows.shape[0] / num_experts)

        multiply = partial(multiply_scaled_blocks, rows, weights)
        return multiply_row_blocks(rows, sizes, columns, read, multiply).astype(rows.dtype)
    return multiply_in_blocks(rows, weights, sizes, dtype=rows.dtype, multiply=matrix_product)


def masked_product(rows: Array, weights: ScaledWeight, sizes: Array) -> Array:
    """Return `scaled_expert_product` as one matmul, in which each expert is a part of the inputs.

    A row [d] becomes [experts, d], with zeros for all experts but its own.
    """
    count = sizes.shape[0]
    is_own = expert_of_rows(rows.shape[0], sizes)[:, None] == jnp.arange(count)[None]
    wide = jnp.where(is_own[..., None], rows[:, None], 0)
    if (num_groups := weights.scale.shape[1]) > 1:
        # Values are scaled as they are multiplied (`matrix_product`), if experts are a dim of their own.
        cut, values = wide.reshape(*wide.shape[:2], num_groups, -1), dequantised(weights, rows.dtype)
        return jnp.einsum("megi,egin->mn", cut, values, preferred_element_type=rows.dtype)

    def merged(array: Array) -> Array:
        return array.reshape(-1, *array.shape[2:])

    return group_products(wide.reshape(rows.shape[0], -1), jax.tree.map(merged, weights), rows.dtype)
