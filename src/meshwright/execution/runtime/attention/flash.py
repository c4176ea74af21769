"""Block-by-block attention as Pallas kernels for TPUs: the functions of `blockwise`, with scores in VMEM only.

FlashAttention-2 (arXiv:2307.08691) as three kernels: forward, backward for queries, backward for keys. They mask by
token positions and document ids, and take and return an unnormalized softmax state, so that keys may arrive chunk by
chunk in any order. Splash attention, the kernel that ships with JAX, has no public backward for such chunks (0.10.2).
The bounds of each block's positions and document ids show whether a block is fully masked (it is neither fetched nor
computed) or fully visible (it is computed without a mask).

Queries are already scaled, and heads come before tokens: queries [b, n, s, h] with n = k * g heads; keys and values
[b, k, t, h], where h of values may differ; softmax sums [b, n, 1, s]. Lengths are multiples of `LANES`. Letters of dims
are as in `blockwise`.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl

from meshwright.execution.runtime.attention.blockwise import BackwardInputs, Keys, SoftmaxState
from meshwright.execution.runtime.attention.flash_grid import Arrays, Grid, GridStep, Ref, bounds_of
from meshwright.execution.runtime.attention.segments import (
    Mask,
    Segments,
    attention_mask,
    bounds_all_visible,
    bounds_any_visible,
)

MASKED_SCORE = -1e30
"""The initial maximum score. It is finite, because minus infinity minus itself is NaN."""

Add = Callable[[Callable[[Array], Array]], None]
"""A function that adds the contribution of a block, given the function that masks the block's scores."""


def init(query: Array, value_dim: int) -> SoftmaxState:
    """Return the softmax state before any key, for values with head dim `value_dim`."""
    b, n, s, _ = query.shape
    sums = jnp.zeros((b, n, 1, s), jnp.float32)
    return SoftmaxState(jnp.zeros((b, n, s, value_dim), jnp.float32), sums + MASKED_SCORE, sums)


def update(state: SoftmaxState, query: Array, segments: Segments, keys: Keys, mask: Mask) -> SoftmaxState:
    """Return the softmax state updated with more keys and values."""
    found = Grid(query.shape, keys.key.shape, keys.value.shape[3], mask).call(
        _update_kernel,
        "fwd",
        (segments, keys.segments),
        carried=(("queries", state.numerator), ("sums", state.max_score), ("sums", state.normalizer)),
        read=(("queries", query), ("keys", keys.key), ("keys", keys.value)),
        num_scratch=2,
    )
    return SoftmaxState(*found)


def finalize(state: SoftmaxState, dtype: jnp.dtype) -> tuple[Array, Array]:
    """Return the output [b, n, s, h] and the log-normalizer [b, n, 1, s]."""
    total = jnp.where(state.normalizer == 0, 1.0, state.normalizer)
    return (state.numerator / jnp.swapaxes(total, 2, 3)).astype(dtype), jnp.log(total) + state.max_score


def inner_product(gradient: Array, output: Array) -> Array:
    """Return the inner product of each query's output and its gradient [b, n, 1, s], in float32."""
    return jnp.einsum("bnsh,bnsh->bns", gradient, output, preferred_element_type=jnp.float32)[:, :, None]


def backward(
    gradient: Array, inputs: BackwardInputs, segments: Segments, keys: Keys, mask: Mask
) -> tuple[Array, Array, Array]:
    """Like `blockwise.backward`, with heads before tokens in every array."""
    shapes, both = (inputs.query.shape, keys.key.shape, keys.value.shape[3]), (segments, keys.segments)
    read: Arrays = (
        ("queries", inputs.query),
        ("queries", inputs.output_gradient),
        ("sums", inputs.log_normalizer),
        ("sums", inputs.output_dot_gradient),
        ("keys", keys.key),
        ("keys", keys.value),
    )
    zeros: Arrays = [("keys", jnp.zeros(x.shape, jnp.float32)) for x in (keys.key, keys.value)]
    grid, grid_by_keys = Grid(*shapes, mask), Grid(*shapes, mask, by_keys=True)
    of_query = grid.call(_backward_queries_kernel, "dq", both, carried=[("queries", gradient)], read=read)
    of_keys = grid_by_keys.call(_backward_keys_kernel, "dkv", both, carried=zeros, read=read)
    return of_query[0], of_keys[0], of_keys[1]


def _update_kernel(grid: Grid, *refs: Ref) -> None:
    """The kernel of `update`. It keeps maximum and normalizer as [rows, LANES] in scratch, equal in every lane."""
    *limits, before, top_before, total_before, query, key, value, rows, columns = refs[:-5]
    weighted, new_top, new_total, top, total = refs[-5:]
    step, is_first, is_last = grid.here()

    @pl.when(is_first)
    def _() -> None:
        weighted[...] = before[...]
        for sums, old in ((top, top_before), (total, total_before)):
            sums[...] = jnp.broadcast_to(_column(old[...]), sums.shape)

    def add(masked: Callable[[Array], Array]) -> None:
        scores = masked(_product(query[...], key[...], (1, 1)))
        highest = jnp.maximum(top[...], scores.max(axis=1, keepdims=True))
        weights, fade = jnp.exp(scores - highest[:, :1]), jnp.exp(top[...] - highest)
        added = _product(weights.astype(value.dtype), value[...], (1, 0))
        weighted[...] = weighted[...] * fade[:, :1] + added
        total[...] = total[...] * fade + weights.sum(axis=1, keepdims=True)
        top[...] = highest

    _where_visible(grid, step, limits, (rows, columns), add)

    @pl.when(is_last)
    def _() -> None:
        new_top[...], new_total[...] = _row(top[...]), _row(total[...])


def _backward_queries_kernel(grid: Grid, *refs: Ref) -> None:
    """The kernel of `backward` for the gradient of queries."""
    *limits, before, query, output, log_total, inner, key, value, rows, columns, gradient = refs
    step, is_first, _ = grid.here()

    @pl.when(is_first)
    def _() -> None:
        gradient[...] = before[...]

    def add(masked: Callable[[Array], Array]) -> None:
        scores = masked(_product(query[...], key[...], (1, 1)))
        weights = jnp.exp(scores - _column(log_total[...]))
        of_weights = _product(output[...], value[...], (1, 1))
        of_scores = weights * (of_weights - _column(inner[...]))
        gradient[...] += _product(of_scores.astype(key.dtype), key[...], (1, 0))

    _where_visible(grid, step, limits, (rows, columns), add)


def _backward_keys_kernel(grid: Grid, *refs: Ref) -> None:
    """The kernel of `backward` for keys and values. Scores are [keys, queries], so that matmuls transpose nothing."""
    *limits, key_before, value_before, query, output, log_total, inner, key, value, rows, columns, of_key, of_value = (
        refs
    )
    step, is_first, _ = grid.here()

    @pl.when(is_first)
    def _() -> None:
        of_key[...], of_value[...] = key_before[...], value_before[...]

    def add(masked: Callable[[Array], Array]) -> None:
        scores = masked(_product(key[...], query[...], (1, 1)))
        weights = jnp.exp(scores - log_total[...])
        of_weights = _product(value[...], output[...], (1, 1))
        of_scores = weights * (of_weights - inner[...])
        of_key[...] += _product(of_scores.astype(query.dtype), query[...], (1, 0))
        of_value[...] += _product(weights.astype(output.dtype), output[...], (1, 0))

    _where_visible(grid, step, limits, (rows, columns), add)


def _where_visible(grid: Grid, step: GridStep, limits: list[Ref], lines: tuple[Ref, Ref], add: Add) -> None:
    """Call `add` for a block, without a mask if it is fully visible; skip a fully masked block.

    limits: bounds of all blocks of queries and of keys. lines: positions, and document ids if any, of the block's
    queries and keys.
    """
    both = bounds_of(step, limits)
    is_visible, is_whole = bounds_any_visible(*both, grid.mask), bounds_all_visible(*both, grid.mask)
    pl.when(is_whole)(lambda: add(lambda scores: scores))

    def masked(scores: Array) -> Array:
        queries, keys = lines[0][...], lines[1][...]
        turned = (keys, queries) if grid.by_keys else (queries, keys)
        down = Segments(*(_column(turned[0][index : index + 1]) for index in range(turned[0].shape[0])))
        along = Segments(*(turned[1][index : index + 1] for index in range(turned[1].shape[0])))
        visible = attention_mask(along, down, grid.mask) if grid.by_keys else attention_mask(down, along, grid.mask)
        return jnp.where(visible, scores, -jnp.inf)

    pl.when(is_visible & ~is_whole)(lambda: add(masked))


def _product(left: Array, right: Array, over: tuple[int, int]) -> Array:
    """Multiply two blocks, contracted over dim over[0] of `left` and over[1] of `right`; the result is float32."""
    dims = (((over[0],), (over[1],)), ((), ()))
    return jax.lax.dot_general(left, right, dims, preferred_element_type=jnp.float32)


def _column(row: Array) -> Array:
    """Reshape [1, length] to [length, 1]."""
    return row[0][:, None]


def _row(sums: Array) -> Array:
    """Return [1, length] of sums [length, LANES] that are equal in every lane."""
    return sums.T[:1]
