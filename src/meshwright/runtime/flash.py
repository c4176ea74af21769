"""Attention block by block in Pallas kernels for TPUs: the steps of `blockwise`, a block's scores on the chip alone.

FlashAttention-2 (arXiv:2307.08691) as three kernels: forward, and backward for queries and for keys. They know tokens
by their places, go on from the softmax of other keys, and return it unfinished; so keys may come in any order and chunk
by chunk, which splash attention, the kernel that comes with JAX, has no public way back through (0.10.2). Blocks in
which nothing is seen are neither fetched nor worked on, those in which all is seen not masked: their bounds tell.

Queries come scaled, and heads before tokens: queries [b, n, s, h] of n = k g heads, keys and values [b, k, t, h], sums
of a softmax [b, n, 1, s]. Lengths are multiples of `LANES`. Letters of dims as in `blockwise`.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl

from meshwright.runtime.blockwise import Gradients, Keys, Seen
from meshwright.runtime.flash_grid import Arrays, Grid, Ref, Step, bounds_of
from meshwright.runtime.places import Mask, Places, all_see, any_may_see, sees

LOWEST = -1e30
"""The largest score of a query that has seen nothing: finite, so that minus infinity less it is no NaN."""

Add = Callable[[Callable[[Array], Array]], None]
"""Adds what a block gives, given what masks its scores."""


def nothing_seen(query: Array) -> Seen:
    """The partial softmax of queries before any key."""
    b, n, s, _ = query.shape
    sums = jnp.zeros((b, n, 1, s), jnp.float32)
    return Seen(jnp.zeros(query.shape, jnp.float32), sums + LOWEST, sums)


def see(seen: Seen, query: Array, places: Places, keys: Keys, mask: Mask) -> Seen:
    """The partial softmax after more keys and values."""
    found = Grid(query.shape, keys.key.shape, mask).call(
        _see,
        "flash_fwd",
        (places, keys.places),
        carried=(("queries", seen.weighted), ("sums", seen.top), ("sums", seen.total)),
        read=(("queries", query), ("keys", keys.key), ("keys", keys.value)),
        num_products=2,
        num_scratch=2,
    )
    return Seen(*found)


def finish(seen: Seen, dtype: jnp.dtype) -> tuple[Array, Array]:
    """The output [b, n, s, h] of all keys seen, and the logarithm of each softmax's sum [b, n, 1, s]."""
    total = jnp.where(seen.total == 0, 1.0, seen.total)
    return (seen.weighted / jnp.swapaxes(total, 2, 3)).astype(dtype), jnp.log(total) + seen.top


def inner_product(gradient: Array, output: Array) -> Array:
    """The inner product [b, n, 1, s] of each query's output and its gradient, in float32."""
    return jnp.einsum("bnsh,bnsh->bns", gradient, output, preferred_element_type=jnp.float32)[:, :, None]


def back(gradient: Array, known: Gradients, places: Places, keys: Keys, mask: Mask) -> tuple[Array, Array, Array]:
    """The queries' gradient with that through some keys added to `gradient`, and the gradients of these, in float32."""
    shapes, both = (known.query.shape, keys.key.shape), (places, keys.places)
    read: Arrays = (
        ("queries", known.query),
        ("queries", known.output),
        ("sums", known.log_total),
        ("sums", known.inner),
        ("keys", keys.key),
        ("keys", keys.value),
    )
    zeros: Arrays = [("keys", jnp.zeros(x.shape, jnp.float32)) for x in (keys.key, keys.value)]
    grid, grid_by_keys = Grid(*shapes, mask), Grid(*shapes, mask, by_keys=True)
    of_query = grid.call(_back_to_queries, "flash_dq", both, carried=[("queries", gradient)], read=read, num_products=3)
    of_keys = grid_by_keys.call(_back_to_keys, "flash_dkv", both, carried=zeros, read=read, num_products=4)
    return of_query[0], of_keys[0], of_keys[1]


def _see(grid: Grid, *refs: Ref) -> None:
    """`see`, the kernel: top and total are [rows, LANES] while its inner steps go on, the same in every lane."""
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

    _where_seen(grid, step, limits, (rows, columns), add)

    @pl.when(is_last)
    def _() -> None:
        new_top[...], new_total[...] = _row(top[...]), _row(total[...])


def _back_to_queries(grid: Grid, *refs: Ref) -> None:
    """`back` for the gradient of queries, the kernel."""
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

    _where_seen(grid, step, limits, (rows, columns), add)


def _back_to_keys(grid: Grid, *refs: Ref) -> None:
    """`back` for the gradients of keys and values, the kernel: on scores [columns, rows], which its products want."""
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

    _where_seen(grid, step, limits, (rows, columns), add)


def _where_seen(grid: Grid, step: Step, limits: list[Ref], lines: tuple[Ref, Ref], add: Add) -> None:
    """Add what a block gives: nothing where no query sees a key, and without a mask where all see all."""
    both = bounds_of(step, limits)
    is_seen, is_whole = any_may_see(*both, grid.mask), all_see(*both, grid.mask)
    pl.when(is_whole)(lambda: add(lambda scores: scores))

    def masked(scores: Array) -> Array:
        queries, keys = lines[0][...], lines[1][...]
        turned = (keys, queries) if grid.by_keys else (queries, keys)
        down = Places(*(_column(turned[0][index : index + 1]) for index in range(turned[0].shape[0])))
        along = Places(*(turned[1][index : index + 1] for index in range(turned[1].shape[0])))
        visible = sees(along, down, grid.mask) if grid.by_keys else sees(down, along, grid.mask)
        return jnp.where(visible, scores, -jnp.inf)

    pl.when(is_seen & ~is_whole)(lambda: add(masked))


def _product(left: Array, right: Array, over: tuple[int, int]) -> Array:
    """The float32 product of two blocks, summed over a dim of each."""
    dims = (((over[0],), (over[1],)), ((), ()))
    return jax.lax.dot_general(left, right, dims, preferred_element_type=jnp.float32)


def _column(row: Array) -> Array:
    """A row [1, length] as a column [length, 1]."""
    return row[0][:, None]


def _row(sums: Array) -> Array:
    """The row [1, length] of sums [length, LANES] that are the same in every lane."""
    return sums.T[:1]
