"""Grouped matmuls: rows times the weights of their expert, and the transpose, which sums rows into weight gradients.

XLA:TPU lowers the first as a ragged dot. In all other cases, compilers would multiply all rows by every expert's
weights (JAX 0.10.2, libtpu 0.0.42.1), so rows are multiplied in blocks of one expert each (MegaBlocks,
arXiv:2211.15841, section 5). The number of blocks is the maximum that any routing needs; a loop ends after those that
this routing needs.

These functions run inside `jax.shard_map`. Dropless rows [m, d] are sorted by expert, and `sizes` [experts] has the
number of rows of each expert. With a capacity, rows are [experts, slots, d], and `sizes` is None.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from meshwright.description.hlo.kernel_cost import KernelCost
from meshwright.description.step.token_routing import expert_blocks
from meshwright.execution.runtime.arrays import widest
from meshwright.execution.runtime.experts.gpu_kernel import fits_kernel, multiply_blocks
from meshwright.execution.runtime.mesh import mesh_platform


def expert_of_rows(count: int, sizes: Array) -> Array:
    """Return the number of the expert of each of `count` sorted rows, of which expert i has `sizes[i]`.

    Rows after the first sum(sizes) get the number of experts.
    """
    # One reduction; the default search is a chain of twenty small ops, of which each takes a TPU a microsecond.
    return jnp.searchsorted(jnp.cumsum(sizes), jnp.arange(count), side="right", method="compare_all")


def grouped_matmul(rows: Array, weights: Array, sizes: Array | None, dtype: Any) -> Array:
    """Return each row multiplied by the weights [experts, d, f] of its expert, in `dtype`.

    Rows after the first sum(sizes) are undefined.
    """
    if sizes is None:
        return jnp.einsum("esd,edf->esf", rows, weights, preferred_element_type=dtype)
    _, size = expert_blocks(rows.shape[0], sizes.shape[0])
    if mesh_platform() == "gpu" and fits_kernel(size, weights):
        return _multiply_by_kernel(rows, weights, sizes, dtype)
    in_groups = partial(lax.ragged_dot, preferred_element_type=dtype)
    return lax.platform_dependent(
        rows, weights, sizes, tpu=in_groups, default=partial(multiply_in_blocks, dtype=dtype, multiply=_dot)
    )


def grouped_matmul_transposed(left: Array, right: Array, sizes: Array | None, dtype: Any) -> Array:
    """Sum the outer products of left [m, d] and right [m, f] over each expert's rows: [experts, d, f] in `dtype`."""
    if sizes is None:
        return jnp.einsum("esd,esf->edf", left, right, preferred_element_type=dtype)
    # Sums are accumulated in float32, or for an integer `dtype` in that dtype.
    count, size = expert_blocks(left.shape[0], sizes.shape[0])
    of_sums = widest(dtype, jnp.float32) if jnp.issubdtype(dtype, jnp.floating) else dtype

    def add(result: tuple[Array, Array], block: RowBlock) -> tuple[Array, Array]:
        total, sums = result
        ours = _block_rows(block, left, size)
        x, y = (jnp.where(ours.is_own, ours.cut(array), 0) for array in (left, right))
        part = jnp.einsum("sd,sf->df", x, y, preferred_element_type=of_sums)
        total = jnp.where(block.is_first, part, total + part)
        return total, lax.dynamic_update_index_in_dim(sums, total.astype(dtype), block.expert, axis=0)

    dims = left.shape[1], right.shape[1]
    zeros = (
        jnp.zeros_like(left, dtype=of_sums, shape=dims),
        jnp.zeros_like(left, dtype=dtype, shape=(sizes.shape[0], *dims)),
    )
    return _over_blocks(add, zeros, _blocks(sizes, count, size))[1]


class RowBlock(NamedTuple):
    """A block of rows of one expert; with n blocks each field is [n].

    start: index of the block's first row. end: index after the last row of its expert. is_first: whether it is the
    first block of its expert. is_needed: whether this routing uses the block.
    """

    expert: Array
    start: Array
    end: Array
    is_first: Array
    is_needed: Array


def _blocks(sizes: Array, count: int, size: int) -> RowBlock:
    """Return `count` blocks of `size` rows that cover the rows of every expert; each expert's last may be partial."""
    each, ends, index = -(-sizes // size), jnp.cumsum(sizes), jnp.arange(count)
    ends_at = jnp.cumsum(each)
    expert = jnp.minimum(jnp.sum(index[:, None] >= ends_at[None, :], axis=1), sizes.shape[0] - 1)
    number = index - (ends_at - each)[expert]
    start = (ends - sizes)[expert] + number * size
    return RowBlock(expert, start, ends[expert], number == 0, index < ends_at[-1])


def multiply_in_blocks(
    rows: Array, weights: Any, sizes: Array, *, dtype: Any, multiply: Callable[[Array, Any, Any], Array]
) -> Array:
    """Return `grouped_matmul` computed in blocks.

    A block that would reach beyond the array starts earlier instead, and does not change rows of other blocks.

    Args:
        weights: an array of the weights of all experts, or a pytree of such arrays.
        multiply: called with a block's rows, its expert's weight and `dtype`; returns their product.
    """
    count, size = expert_blocks(rows.shape[0], sizes.shape[0])

    def fill(result: Array, block: RowBlock) -> Array:
        ours = _block_rows(block, rows, size)
        product = multiply(ours.cut(rows), jax.tree.map(lambda array: array[block.expert], weights), dtype)
        kept = jnp.where(ours.is_own, product, ours.cut(result))
        return lax.dynamic_update_slice_in_dim(result, kept, ours.start, axis=0)

    columns = jax.tree.leaves(weights)[0].shape[-1]
    zeros = jnp.zeros_like(rows, dtype=dtype, shape=(rows.shape[0], columns))
    return _over_blocks(fill, zeros, _blocks(sizes, count, size))


def _dot(rows: Array, weight: Array, dtype: Any) -> Array:
    return jnp.dot(rows, weight, preferred_element_type=dtype)


def _multiply_by_kernel(rows: Array, weights: Array, sizes: Array, dtype: Any, **options: Any) -> Array:
    """Return `grouped_matmul` of few rows, by the GPU kernel. options: arguments of the kernel's `pallas_call`."""
    num_experts, inner, columns = weights.shape
    read = min(rows.shape[0], num_experts) * inner * columns * weights.dtype.itemsize
    return multiply_row_blocks(
        rows, sizes, columns, read, partial(multiply_blocks, rows, weights, dtype=dtype, **options)
    )


def multiply_row_blocks(
    rows: Array, sizes: Array, columns: int, weight_bytes: float, multiply: Callable[..., Array]
) -> Array:
    """Return `grouped_matmul` of few rows by a kernel for blocks of rows.

    Args:
        weight_bytes: bytes of weights that the kernel reads.
        multiply: called with the blocks and their size, as in `gpu_kernel.multiply_blocks`; returns the products.
    """
    num_rows, inner = rows.shape
    count, size = expert_blocks(num_rows, sizes.shape[0])
    blocks = _blocks(sizes, count, size)
    ends = jnp.where(blocks.is_needed, jnp.minimum(blocks.start + size, blocks.end), blocks.start)
    moved = num_rows * (inner + columns) * rows.dtype.itemsize
    read = min(num_rows, sizes.shape[0]) * inner * columns
    with jax.named_scope(KernelCost(2 * num_rows * inner * columns, int(weight_bytes + moved), weights=read).scope):
        return multiply(blocks=jnp.stack([blocks.expert, blocks.start, ends], axis=1), size=size)


def _over_blocks(do: Any, result: Any, blocks: RowBlock) -> Any:
    """Return the result of do(result, block), applied to each block that is needed, in a loop that ends after these.

    With a loop over all blocks and a branch in it, XLA:GPU would copy the result in each iteration (JAX 0.10.2).
    """
    needed, count = jnp.sum(blocks.is_needed), blocks.is_needed.shape[0]

    def goes_on(state: tuple[Array, Any]) -> Array:
        # The second comparison shows the maximum trip count in the program's text.
        return (state[0] < needed) & (state[0] < count)

    def step(state: tuple[Array, Any]) -> tuple[Array, Any]:
        number, result = state
        block = jax.tree.map(lambda each: lax.dynamic_index_in_dim(each, number, keepdims=False), blocks)
        return number + 1, do(result, block)

    return lax.while_loop(goes_on, step, (jnp.zeros_like(needed), result))[1]


class BlockRows(NamedTuple):
    """The rows of an array that are read for a block, from `start` on. is_own: True for rows of the block [size, 1]."""

    start: Array
    is_own: Array

    def cut(self, array: Array) -> Array:
        """Slice these rows from an array."""
        return lax.dynamic_slice_in_dim(array, self.start, self.is_own.shape[0], axis=0)


def _block_rows(block: RowBlock, rows: Array, size: int) -> BlockRows:
    start = jnp.minimum(block.start, rows.shape[0] - size)
    index = start + jnp.arange(size)
    return BlockRows(start, ((index >= block.start) & (index < block.end))[:, None])
