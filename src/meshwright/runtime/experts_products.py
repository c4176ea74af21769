"""Products of rows, each with the weights of its expert; and of two arrays of rows, summed over those of each expert.

XLA:TPU has the first, of rows in groups. For the others compilers multiply all rows for every group (JAX 0.10.2, libtpu
0.0.42.1). There rows are multiplied block by block, each of one expert (MegaBlocks, arXiv:2211.15841, section 5): as
many blocks as any routing could need, of which those that it does not need are left out as the program runs.

To be called inside `jax.shard_map`. rows [m, d] are sorted by expert, `sizes` [experts] of them for each; with slots
[experts, slots, d], and `sizes` is None.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from meshwright.workload import expert_blocks


def multiply(rows: Array, weights: Array, sizes: Array | None, dtype: Any) -> Array:
    """Each row times the weights [experts, d, f] of its expert, in `dtype`; rows beyond `sizes` become anything."""
    if sizes is None:
        return jnp.einsum("esd,edf->esf", rows, weights, preferred_element_type=dtype)
    in_groups = partial(lax.ragged_dot, preferred_element_type=dtype)
    return lax.platform_dependent(
        rows, weights, sizes, tpu=in_groups, default=partial(_multiply_in_blocks, dtype=dtype)
    )


def multiply_over_rows(left: Array, right: Array, sizes: Array | None, dtype: Any) -> Array:
    """left [m, d] and right [m, f] summed over the rows of each expert, [experts, d, f] in `dtype`."""
    if sizes is None:
        return jnp.einsum("esd,esf->edf", left, right, preferred_element_type=dtype)
    return _sum_in_blocks(left, right, sizes, dtype)


class Block(NamedTuple):
    """A block of rows of one expert, or [n] of each: where it begins, and where the rows of its expert end.

    is_first: whether it is its expert's first. is_there: whether this routing needs it.
    """

    expert: Array
    start: Array
    end: Array
    is_first: Array
    is_there: Array


def _blocks(sizes: Array, count: int, size: int) -> Block:
    """`count` blocks of `size` rows, expert after expert, the last of each the rest of its rows."""
    each, ends, index = -(-sizes // size), jnp.cumsum(sizes), jnp.arange(count)
    ends_at = jnp.cumsum(each)
    expert = jnp.minimum(jnp.sum(index[:, None] >= ends_at, axis=1), sizes.shape[0] - 1)
    number = index - (ends_at - each)[expert]
    start = (ends - sizes)[expert] + number * size
    return Block(expert, start, ends[expert], number == 0, index < ends_at[-1])


def _multiply_in_blocks(rows: Array, weights: Array, sizes: Array, *, dtype: Any) -> Array:
    """`multiply`; a block at the end of all rows begins sooner, and leaves rows that are not its own as they are."""
    count, size = expert_blocks(rows.shape[0], sizes.shape[0])

    def fill(made: Array, block: Block) -> Array:
        ours = _own(block, rows, size)
        product = jnp.dot(ours.cut(rows), weights[block.expert], preferred_element_type=dtype)
        kept = jnp.where(ours.are_own, product, ours.cut(made))
        return lax.dynamic_update_slice_in_dim(made, kept, ours.start, axis=0)

    nothing = jnp.zeros_like(rows, dtype=dtype, shape=(rows.shape[0], weights.shape[2]))
    return _over_blocks(fill, nothing, _blocks(sizes, count, size))


def _sum_in_blocks(left: Array, right: Array, sizes: Array, dtype: Any) -> Array:
    """`multiply_over_rows`; the sum of an expert's blocks so far is in float32, or what integers are summed in."""
    count, size = expert_blocks(left.shape[0], sizes.shape[0])
    of_sums = jnp.promote_types(dtype, jnp.float32) if jnp.issubdtype(dtype, jnp.floating) else dtype

    def add(made: tuple[Array, Array], block: Block) -> tuple[Array, Array]:
        total, sums = made
        ours = _own(block, left, size)
        x, y = (jnp.where(ours.are_own, ours.cut(array), 0) for array in (left, right))
        part = jnp.einsum("sd,sf->df", x, y, preferred_element_type=of_sums)
        total = jnp.where(block.is_first, part, total + part)
        return total, lax.dynamic_update_index_in_dim(sums, total.astype(dtype), block.expert, axis=0)

    dims = left.shape[1], right.shape[1]
    nothing = (
        jnp.zeros_like(left, dtype=of_sums, shape=dims),
        jnp.zeros_like(left, dtype=dtype, shape=(sizes.shape[0], *dims)),
    )
    return _over_blocks(add, nothing, _blocks(sizes, count, size))[1]


def _over_blocks(do: Any, made: Any, blocks: Block) -> Any:
    """What is made block by block, of those that are there.

    The loop ends with them. A branch would have XLA:GPU copy what is made so far, block after block (JAX 0.10.2).
    """
    needed, count = jnp.sum(blocks.is_there), blocks.is_there.shape[0]

    def goes_on(state: tuple[Array, Any]) -> Array:
        # The second says to who reads the program how often the loop runs at most.
        return (state[0] < needed) & (state[0] < count)

    def step(state: tuple[Array, Any]) -> tuple[Array, Any]:
        number, made = state
        block = jax.tree.map(lambda each: lax.dynamic_index_in_dim(each, number, keepdims=False), blocks)
        return number + 1, do(made, block)

    return lax.while_loop(goes_on, step, (jnp.zeros_like(needed), made))[1]


class Own(NamedTuple):
    """Rows of an array that a block is among, from `start`, and which of them are its own [size, 1]."""

    start: Array
    are_own: Array

    def cut(self, array: Array) -> Array:
        """The rows."""
        return lax.dynamic_slice_in_dim(array, self.start, self.are_own.shape[0], axis=0)


def _own(block: Block, rows: Array, size: int) -> Own:
    """Where a block of rows is read."""
    start = jnp.minimum(block.start, rows.shape[0] - size)
    index = start + jnp.arange(size)
    return Own(start, ((index >= block.start) & (index < block.end))[:, None])
