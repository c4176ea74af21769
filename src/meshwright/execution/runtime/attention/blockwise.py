"""Block-by-block attention with an online softmax: the full score matrix is never materialized.

Online softmax: arXiv:1805.02867 and arXiv:2112.05682. Backward from the saved log-normalizer: FlashAttention
(arXiv:2205.14135, algorithm 4). Query heads stay grouped by the kv head they share. The mask follows from token
positions and document ids, not from array indices; fully masked blocks are skipped. Dims: b batch, s queries, t keys, k
kv heads, g query heads per kv head, h head dim; values may have a different head dim.
"""

from __future__ import annotations

import math
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import Array

from meshwright.description.step.sequence import BLOCK
from meshwright.execution.runtime.attention.segments import Mask, Segments, any_visible, pairwise_mask

Tree = TypeVar("Tree")

ATTENTION_RESIDUALS = "attention_residuals"
"""Checkpoint name of the arrays that attention's backward reads: keys and values, the output and the log-normalizer."""


class Keys(NamedTuple):
    """Keys and values [b, t, k, h] and the segments of their tokens [b, t]."""

    key: Array
    value: Array
    segments: Segments


class SoftmaxState(NamedTuple):
    """State of the online softmax, in float32: numerator [b, s, k, g, h], maximum score and normalizer [b, k, g, s]."""

    numerator: Array
    max_score: Array
    normalizer: Array


class BackwardInputs(NamedTuple):
    """Inputs of backward for each query.

    Queries and gradients of their outputs are [b, s, k, g, h]; log-normalizers, and inner products of output and
    gradient, are [b, k, g, s].
    """

    query: Array
    output_gradient: Array
    log_normalizer: Array
    output_dot_gradient: Array


def segments_after_query(query: Array, segments: Segments, keys: Keys) -> tuple[Array, Segments, Keys]:
    """Return the arguments, with an optimization barrier that keeps XLA from computing masks before the query is ready.

    Masks depend only on segments, which are the same in every layer. Without the barrier JAX would compute the masks of
    all blocks before the first layer, together as large as all scores (JAX 0.10.2).
    """
    query, segments, of_keys = jax.lax.optimization_barrier((query, segments, keys.segments))
    return query, segments, keys._replace(segments=of_keys)


def inner_product(gradient: Array, output: Array) -> Array:
    """Return the inner product of each query's output and its gradient [b, k, g, s], in float32."""
    return jnp.einsum("bskgh,bskgh->bkgs", gradient, output, preferred_element_type=jnp.float32)


def init(query: Array, value_dim: int) -> SoftmaxState:
    """Return the softmax state before any key, for values with head dim `value_dim`.

    It varies over the same mesh axes as the queries.
    """
    zeros = jnp.zeros_like(query[..., :1], dtype=jnp.float32)
    sums = jnp.einsum("bskgh->bkgs", zeros)
    return SoftmaxState(jnp.repeat(zeros, value_dim, axis=-1), sums - jnp.inf, sums)


def update(state: SoftmaxState, query: Array, segments: Segments, keys: Keys, mask: Mask) -> SoftmaxState:
    """Return the softmax state updated with more keys and values."""
    rows, columns = block_size(query.shape[1]), block_size(keys.key.shape[1])
    blocks = _tree_to_blocks(keys, columns)

    def row(item: tuple[SoftmaxState, Array, Segments]) -> SoftmaxState:
        state, query, segments = item

        def column(state: SoftmaxState, keys: Keys) -> tuple[SoftmaxState, None]:
            return jax.lax.cond(
                any_visible(segments, keys.segments, mask),
                lambda: _update_block(state, query, segments, keys, mask),
                lambda: state,
            ), None

        return jax.lax.scan(column, state, blocks)[0]

    cut = SoftmaxState(
        _to_blocks(state.numerator, rows),
        _sums_to_blocks(state.max_score, rows),
        _sums_to_blocks(state.normalizer, rows),
    )
    made = jax.lax.map(row, (cut, _to_blocks(query, rows), _tree_to_blocks(segments, rows)))
    sums = (jnp.moveaxis(x, 0, 3).reshape(*x.shape[1:4], -1) for x in made[1:])
    return SoftmaxState(_from_blocks(made.numerator), *sums)


def finalize(state: SoftmaxState, dtype: jnp.dtype) -> tuple[Array, Array]:
    """Return the output [b, s, k, g, h] and the log-normalizer [b, k, g, s]."""
    total = jnp.where(state.normalizer == 0, 1.0, state.normalizer)
    output = state.numerator / jnp.einsum("bkgs->bskg", total)[..., None]
    return output.astype(dtype), jnp.log(total) + state.max_score


def backward(
    gradient: Array, inputs: BackwardInputs, segments: Segments, keys: Keys, mask: Mask
) -> tuple[Array, Array, Array]:
    """Return the float32 gradients of queries, keys and values, for the attention of all queries to one chunk of keys.

    Args:
      gradient: the queries' gradient from earlier chunks [b, s, k, g, h]; it is added to the first result.
      segments: the queries' segments.
      keys: the chunk's keys and values.
    """
    rows, columns = block_size(inputs.query.shape[1]), block_size(keys.key.shape[1])
    cut = BackwardInputs(
        _to_blocks(inputs.query, rows),
        _to_blocks(inputs.output_gradient, rows),
        _sums_to_blocks(inputs.log_normalizer, rows),
        _sums_to_blocks(inputs.output_dot_gradient, rows),
    )
    queries = cut, _tree_to_blocks(segments, rows)

    def column(gradient: Array, keys: Keys) -> tuple[Array, tuple[Array, Array]]:
        def row(
            sums: tuple[Array, Array], item: tuple[Array, BackwardInputs, Segments]
        ) -> tuple[tuple[Array, Array], Array]:
            gradient, inputs, segments = item
            found = jax.lax.cond(
                any_visible(segments, keys.segments, mask),
                lambda: _backward_block(gradient, sums, inputs, segments, keys, mask),
                lambda: (gradient, sums),
            )
            return found[1], found[0]

        zeros = (jnp.zeros_like(keys.key, dtype=jnp.float32), jnp.zeros_like(keys.value, dtype=jnp.float32))
        sums, gradient = jax.lax.scan(row, zeros, (gradient, *queries))
        return gradient, sums

    gradient, (of_key, of_value) = jax.lax.scan(column, _to_blocks(gradient, rows), _tree_to_blocks(keys, columns))
    return _from_blocks(gradient), _from_blocks(of_key), _from_blocks(of_value)


def block_size(length: int) -> int:
    """Return the tokens per block of a sequence: the largest divisor of its length up to `BLOCK` and half the length.

    If that divisor is too small to be efficient, the block is the whole sequence.
    """
    found = next(size for size in range(min(BLOCK, max(1, length // 2)), 0, -1) if length % size == 0)
    return found if found * 16 >= min(length, BLOCK) else length


def _update_block(state: SoftmaxState, query: Array, segments: Segments, keys: Keys, mask: Mask) -> SoftmaxState:
    scores = _scores(query, segments, keys, mask)
    top = jnp.maximum(state.max_score, scores.max(axis=-1))
    # The maximum is minus infinity for a query that has no visible key so far.
    base = jnp.where(jnp.isneginf(top), 0.0, top)
    weights, fade = jnp.exp(scores - base[..., None]), jnp.exp(state.max_score - base)
    value = keys.value
    added = jnp.einsum("bkgst,btkh->bskgh", weights.astype(value.dtype), value, preferred_element_type=jnp.float32)
    return SoftmaxState(
        state.numerator * jnp.einsum("bkgs->bskg", fade)[..., None] + added,
        top,
        state.normalizer * fade + weights.sum(axis=-1),
    )


def _backward_block(
    gradient: Array, sums: tuple[Array, Array], inputs: BackwardInputs, segments: Segments, keys: Keys, mask: Mask
) -> tuple[Array, tuple[Array, Array]]:
    key, value = keys.key, keys.value
    weights = jnp.exp(_scores(inputs.query, segments, keys, mask) - inputs.log_normalizer[..., None])
    of_weights = jnp.einsum("bskgh,btkh->bkgst", inputs.output_gradient, value, preferred_element_type=jnp.float32)
    of_scores = weights * (of_weights - inputs.output_dot_gradient[..., None]) / math.sqrt(key.shape[-1])
    of_scores, weights = of_scores.astype(key.dtype), weights.astype(value.dtype)
    of_query = jnp.einsum("bkgst,btkh->bskgh", of_scores, key, preferred_element_type=jnp.float32)
    of_key = jnp.einsum("bkgst,bskgh->btkh", of_scores, inputs.query, preferred_element_type=jnp.float32)
    of_value = jnp.einsum("bkgst,bskgh->btkh", weights, inputs.output_gradient, preferred_element_type=jnp.float32)
    return gradient + of_query, (sums[0] + of_key, sums[1] + of_value)


def _scores(query: Array, segments: Segments, keys: Keys, mask: Mask) -> Array:
    """Return float32 scores [b, k, g, s, t], minus infinity where masked."""
    scores = jnp.einsum("bskgh,btkh->bkgst", query, keys.key, preferred_element_type=jnp.float32)
    visible = pairwise_mask(segments, keys.segments, mask)
    return jnp.where(visible[:, None, None], scores / math.sqrt(query.shape[-1]), -jnp.inf)


def _to_blocks(x: Array, size: int) -> Array:
    """Reshape [b, s, ...] to [s / size, b, size, ...]."""
    b, s, *rest = x.shape
    return jnp.moveaxis(x.reshape(b, s // size, size, *rest), 1, 0)


def _from_blocks(x: Array) -> Array:
    """The inverse of `_to_blocks`."""
    n, b, size, *rest = x.shape
    return jnp.moveaxis(x, 0, 1).reshape(b, n * size, *rest)


def _sums_to_blocks(x: Array, size: int) -> Array:
    """Reshape [b, k, g, s] to [s / size, b, k, g, size]."""
    return jnp.moveaxis(x.reshape(*x.shape[:3], -1, size), 3, 0)


def _tree_to_blocks(tree: Tree, size: int) -> Tree:
    return jax.tree.map(lambda x: _to_blocks(x, size), tree)
