"""Attention block by block: softmax kept up as blocks of keys come in, so that scores never exist at once.

Online softmax: arXiv:1805.02867 and arXiv:2112.05682; the backward pass from the saved logarithm of the sum:
FlashAttention (arXiv:2205.14135, algorithm 4). Query heads stay grouped by the kv head they share. What a query sees
follows from the true places of tokens, not from where they lie in the arrays, and blocks that nothing is seen in are
skipped. Letters of dims: b batch, s queries, t keys, k kv heads, g query heads a kv head, h head dim.
"""

from __future__ import annotations

import math
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import Array

from meshwright.runtime.places import Mask, Places, is_seen, is_visible
from meshwright.workload import BLOCK

Tree = TypeVar("Tree")

ATTENDED = "attended"
"""The name of what backward of attention reads: its keys and values, its output and the logarithms of its sums."""


class Keys(NamedTuple):
    """Keys and values [b, t, k, h] of tokens, and their places."""

    key: Array
    value: Array
    places: Places


class Seen(NamedTuple):
    """Softmax of the keys seen so far: its numerator [b, s, k, g, h], largest score and sum [b, k, g, s], float32."""

    weighted: Array
    top: Array
    total: Array


class Gradients(NamedTuple):
    """What backward knows of the queries: them, their output's gradient, log-sum and its inner product with output."""

    query: Array
    output: Array
    log_total: Array
    inner: Array


def held(query: Array, places: Places, keys: Keys) -> tuple[Array, Places, Keys]:
    """Its arguments, places not to be had before the query.

    Places are the same in every layer, and masks follow from places alone: JAX would make those of all blocks at once
    before the first layer (JAX 0.10.2), as large as all scores.
    """
    query, places, of_keys = jax.lax.optimization_barrier((query, places, keys.places))
    return query, places, keys._replace(places=of_keys)


def inner_product(gradient: Array, output: Array) -> Array:
    """The inner product [b, k, g, s] of each query's output and its gradient, in float32."""
    return jnp.einsum("bskgh,bskgh->bkgs", gradient, output, preferred_element_type=jnp.float32)


def nothing_seen(query: Array) -> Seen:
    """The partial softmax of a query array before any key; as varied over mesh axes as the queries are."""
    weighted = jnp.zeros_like(query, dtype=jnp.float32)
    zeros = jnp.einsum("bskgh->bkgs", weighted)
    return Seen(weighted, zeros - jnp.inf, zeros)


def see(seen: Seen, query: Array, places: Places, keys: Keys, mask: Mask) -> Seen:
    """The partial softmax after more keys and values."""
    rows, columns = block_size(query.shape[1]), block_size(keys.key.shape[1])
    blocks = _blocks(keys, columns)

    def row(item: tuple[Seen, Array, Places]) -> Seen:
        seen, query, places = item

        def column(seen: Seen, keys: Keys) -> tuple[Seen, None]:
            return jax.lax.cond(
                is_seen(places, keys.places, mask),
                lambda: _see_block(seen, query, places, keys, mask),
                lambda: seen,
            ), None

        return jax.lax.scan(column, seen, blocks)[0]

    return _joined(jax.lax.map(row, _row_blocks(seen, query, places, rows)))


def finish(seen: Seen, dtype: jnp.dtype) -> tuple[Array, Array]:
    """The output [b, s, k, g, h] of all keys seen, and the logarithm of each softmax's sum [b, k, g, s]."""
    total = jnp.where(seen.total == 0, 1.0, seen.total)
    output = seen.weighted / jnp.einsum("bkgs->bskg", total)[..., None]
    return output.astype(dtype), jnp.log(total) + seen.top


def back(gradient: Array, known: Gradients, places: Places, keys: Keys, mask: Mask) -> tuple[Array, Array, Array]:
    """The queries' gradient with that through some keys added to `gradient`, and the gradients of these, in float32."""
    rows, columns = block_size(known.query.shape[1]), block_size(keys.key.shape[1])
    queries = _gradient_blocks(known, places, rows)

    def column(gradient: Array, keys: Keys) -> tuple[Array, tuple[Array, Array]]:
        def row(sums: tuple[Array, Array], item: tuple[Array, Gradients, Places]) -> tuple[tuple[Array, Array], Array]:
            gradient, known, places = item
            found = jax.lax.cond(
                is_seen(places, keys.places, mask),
                lambda: _back_block(gradient, sums, known, places, keys, mask),
                lambda: (gradient, sums),
            )
            return found[1], found[0]

        zeros = (jnp.zeros_like(keys.key, dtype=jnp.float32), jnp.zeros_like(keys.value, dtype=jnp.float32))
        sums, gradient = jax.lax.scan(row, zeros, (gradient, *queries))
        return gradient, sums

    gradient, (of_key, of_value) = jax.lax.scan(column, _cut(gradient, rows), _blocks(keys, columns))
    return _sewn(gradient), _sewn(of_key), _sewn(of_value)


def block_size(length: int) -> int:
    """The largest part of a length, up to half of it and `BLOCK`, that divides it; all of it where that is tiny."""
    found = next(size for size in range(min(BLOCK, max(1, length // 2)), 0, -1) if length % size == 0)
    return found if found * 16 >= min(length, BLOCK) else length


def _see_block(seen: Seen, query: Array, places: Places, keys: Keys, mask: Mask) -> Seen:
    """`see` for one block of queries and one of keys."""
    scores = _scores(query, places, keys, mask)
    top = jnp.maximum(seen.top, scores.max(axis=-1))
    # A query that has seen nothing yet has no largest score to take off.
    base = jnp.where(jnp.isneginf(top), 0.0, top)
    weights, fade = jnp.exp(scores - base[..., None]), jnp.exp(seen.top - base)
    value = keys.value
    added = jnp.einsum("bkgst,btkh->bskgh", weights.astype(value.dtype), value, preferred_element_type=jnp.float32)
    return Seen(
        seen.weighted * jnp.einsum("bkgs->bskg", fade)[..., None] + added,
        top,
        seen.total * fade + weights.sum(axis=-1),
    )


def _back_block(
    gradient: Array, sums: tuple[Array, Array], known: Gradients, places: Places, keys: Keys, mask: Mask
) -> tuple[Array, tuple[Array, Array]]:
    """`back` for one block of queries and one of keys."""
    key, value = keys.key, keys.value
    weights = jnp.exp(_scores(known.query, places, keys, mask) - known.log_total[..., None])
    of_weights = jnp.einsum("bskgh,btkh->bkgst", known.output, value, preferred_element_type=jnp.float32)
    of_scores = weights * (of_weights - known.inner[..., None]) / math.sqrt(key.shape[-1])
    of_scores, weights = of_scores.astype(key.dtype), weights.astype(value.dtype)
    of_query = jnp.einsum("bkgst,btkh->bskgh", of_scores, key, preferred_element_type=jnp.float32)
    of_key = jnp.einsum("bkgst,bskgh->btkh", of_scores, known.query, preferred_element_type=jnp.float32)
    of_value = jnp.einsum("bkgst,bskgh->btkh", weights, known.output, preferred_element_type=jnp.float32)
    return gradient + of_query, (sums[0] + of_key, sums[1] + of_value)


def _scores(query: Array, places: Places, keys: Keys, mask: Mask) -> Array:
    """The float32 scores [b, k, g, s, t], minus infinity where nothing is seen."""
    scores = jnp.einsum("bskgh,btkh->bkgst", query, keys.key, preferred_element_type=jnp.float32)
    visible = is_visible(places, keys.places, mask)
    return jnp.where(visible[:, None, None], scores / math.sqrt(query.shape[-1]), -jnp.inf)


def _cut(x: Array, size: int) -> Array:
    """An array [b, s, ...] as blocks [s / size, b, size, ...]."""
    b, s, *rest = x.shape
    return jnp.moveaxis(x.reshape(b, s // size, size, *rest), 1, 0)


def _sewn(x: Array) -> Array:
    """The blocks of `_cut` as one array."""
    n, b, size, *rest = x.shape
    return jnp.moveaxis(x, 0, 1).reshape(b, n * size, *rest)


def _cut_sums(x: Array, size: int) -> Array:
    """Sums [b, k, g, s] as blocks [s / size, b, k, g, size]."""
    return jnp.moveaxis(x.reshape(*x.shape[:3], -1, size), 3, 0)


def _blocks(tree: Tree, size: int) -> Tree:
    """Every array of a tree cut along its tokens."""
    return jax.tree.map(lambda x: _cut(x, size), tree)


def _row_blocks(seen: Seen, query: Array, places: Places, size: int) -> tuple[Seen, Array, Places]:
    """Blocks of queries with what they have seen."""
    cut = Seen(_cut(seen.weighted, size), _cut_sums(seen.top, size), _cut_sums(seen.total, size))
    return cut, _cut(query, size), _blocks(places, size)


def _gradient_blocks(known: Gradients, places: Places, size: int) -> tuple[Gradients, Places]:
    """Blocks of queries with what backward knows of them."""
    cut = Gradients(
        _cut(known.query, size),
        _cut(known.output, size),
        _cut_sums(known.log_total, size),
        _cut_sums(known.inner, size),
    )
    return cut, _blocks(places, size)


def _joined(blocks: Seen) -> Seen:
    """The partial softmax of all blocks of queries."""
    sums = (jnp.moveaxis(x, 0, 3).reshape(*x.shape[1:4], -1) for x in blocks[1:])
    return Seen(_sewn(blocks.weighted), *sums)
