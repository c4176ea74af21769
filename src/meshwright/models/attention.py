"""Causal attention with grouped query heads, whose scores go through memory."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

from meshwright.models.dropout import DropoutRng, dropout_of_weights
from meshwright.models.remat import INTERMEDIATE, SCORES
from meshwright.runtime import cotangent_spec
from meshwright.runtime.attention.blockwise import ATTENTION_RESIDUALS
from meshwright.step import can_halve_queries, num_query_chunks


class Scoring(NamedTuple):
    """How scores follow from products of queries and keys: over `divisor`, then softcap * tanh(score / softcap)."""

    divisor: float
    softcap: float | None = None


class Chunks(NamedTuple):
    """Chunks of queries [n, b, c, k, g, h], their places [n, c] and, where some are drawn for, numbers [n, b, c].

    Inside a loop over chunks, one of them.
    """

    query: Array
    positions: Array
    tokens: Array | None

    def rng(self, of_all: DropoutRng | None) -> DropoutRng | None:
        """The dropout of one chunk."""
        return None if of_all is None or self.tokens is None else replace(of_all, tokens=self.tokens)


class Known(NamedTuple):
    """What forward knows of queries: they, weights [b, k, g, s, t] to be divided by their sums `total`, the output.

    top: weights are exp(score - top); kept where scores are capped, whose gradient needs them.
    """

    query: Array
    weights: Array
    total: Array
    mixed: Array
    top: Array | None


def attend(
    query: Array,
    key: Array,
    value: Array,
    positions: Array,
    rng: DropoutRng | None = None,
    *,
    scoring: Scoring | None = None,
    window: Array | int | None = None,
) -> Array:
    """Causal attention of queries over keys, whose scores go through memory. Scores and softmax are float32.

    Args:
        query: [b, s, kv_heads, group, head_dim]. As many queries as keys are a whole sequence in order.
        key, value: [b, t, kv_heads, head_dim], at positions from 0.
        positions: the positions [s] of the queries among the keys; a query attends to keys up to its own.
        rng: which weights are dropped, if any.
        scoring: a divisor of sqrt(head_dim) and no cap where None.
        window: how many keys a query attends to, its own included; None for all before it.

    Returns an array of the query's shape and dtype, named `INTERMEDIATE`.
    """
    how = scoring or Scoring(math.sqrt(query.shape[-1]))
    reach = None if window is None else jnp.int32(window)
    num_chunks = num_query_chunks(query.shape[1])
    if num_chunks == 1:
        return _mixed_by_half(how, query, key, value, positions, reach, rng)
    # Chunk j takes every num_chunks-th query from j: so a sequence split over a mesh axis is split evenly in each.
    b, s, *heads = query.shape
    chunks = jnp.moveaxis(query.reshape(b, s // num_chunks, num_chunks, *heads), 2, 0)
    places = jnp.moveaxis(positions.reshape(s // num_chunks, num_chunks), 1, 0)
    tokens = rng and jnp.moveaxis(rng.tokens.reshape(b, s // num_chunks, num_chunks), 2, 0)
    mixed: Any = _mixed_by_chunk(how, Chunks(chunks, places, tokens), key, value, reach, rng)
    return checkpoint_name(jnp.moveaxis(mixed, 0, 2).reshape(query.shape), INTERMEDIATE)


def _mixed_by_half(
    how: Scoring, query: Array, key: Array, value: Array, positions: Array, reach: Array | None, rng: DropoutRng | None
) -> Array:
    """`_mixed`, each half of a whole sequence for itself: the first sees no key of the second, a quarter of all scores.

    In more parts still less is made, in products so small that little is won.
    """
    length = query.shape[1]
    # Shards of a sequence are one program, in which none may leave out what another needs.
    is_whole = length == key.shape[1] and jax.typeof(query).sharding.spec[1] is None

    def mixed(start: int, stop: int) -> Array:
        own = rng and replace(rng, tokens=rng.tokens[:, start:stop])
        return _mixed(how, query[:, start:stop], key[:, :stop], value[:, :stop], positions[start:stop], reach, own)

    if not (is_whole and can_halve_queries(length)):
        return _mixed(how, query, key, value, positions, reach, rng)
    return jnp.concatenate([mixed(0, length // 2), mixed(length // 2, length)], axis=1)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _mixed(
    how: Scoring, query: Array, key: Array, value: Array, positions: Array, reach: Array | None, rng: DropoutRng | None
) -> Array:
    """The values that queries mix by the softmax of their scores, [b, s, k, g, h].

    Backward is written out because JAX's own goes through arrays of scores [b, k, g, s, t], the largest of all, twice
    as often. Here what they mix is divided by their sums instead of them; the softmax's inner product is that of the
    output with its gradient (FlashAttention, arXiv:2205.14135, appendix B.2); and no product has them transposed.
    """
    return _forward(how, query, key, value, positions, reach, rng)[0]


def _forward(
    how: Scoring, query: Array, key: Array, value: Array, positions: Array, reach: Array | None, rng: DropoutRng | None
) -> tuple[Array, tuple[Any, ...]]:
    """The output, and what backward needs."""
    scores = _scores(how, query, key, positions, reach)
    top = jnp.max(scores, axis=-1, keepdims=True)
    weights = checkpoint_name(jnp.exp(scores - top), SCORES)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    mixed = checkpoint_name(_mix(weights, total, value, rng, query.dtype), INTERMEDIATE)
    return mixed, (Known(query, weights, total, mixed, top if how.softcap else None), key, value, rng)


def _backward(how: Scoring, saved: tuple[Any, ...], gradient: Array) -> tuple[Array, Array, Array, None, None, None]:
    """The gradients of queries, keys and values."""
    known, key, value, rng = saved
    return *_gradients(how, known, key, value, rng, gradient), None, None, None


_mixed.defvjp(_forward, _backward)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _mixed_by_chunk(
    how: Scoring, chunks: Chunks, key: Array, value: Array, reach: Array | None, rng: DropoutRng | None
) -> Array:
    """`_mixed` of one chunk of queries after the other, [n, b, c, k, g, h]: backward recomputes the scores of each."""
    return _forward_by_chunk(how, chunks, key, value, reach, rng)[0]


def _forward_by_chunk(
    how: Scoring, chunks: Chunks, key: Array, value: Array, reach: Array | None, rng: DropoutRng | None
) -> tuple[Array, tuple[Any, ...]]:
    """The output, and what backward needs: no scores, but the logarithm of each softmax's sum."""

    def mix(chunk: Chunks) -> tuple[Array, Array]:
        scores = _scores(how, chunk.query, key, chunk.positions, reach)
        top = jnp.max(scores, axis=-1, keepdims=True)
        weights = jnp.exp(scores - top)
        total = jnp.sum(weights, axis=-1, keepdims=True)
        return _mix(weights, total, value, chunk.rng(rng), chunk.query.dtype), top + jnp.log(total)

    mixed, log_total = checkpoint_name(jax.lax.map(mix, chunks), ATTENTION_RESIDUALS)
    return mixed, (chunks, key, value, reach, rng, mixed, log_total)


def _backward_by_chunk(
    how: Scoring, saved: tuple[Any, ...], gradient: Array
) -> tuple[Chunks, Array, Array, None, None]:
    """The gradients of queries, keys and values, those of the last two added up chunk by chunk."""
    chunks, key, value, reach, rng, mixed, log_total = saved

    def back(sums: tuple[Array, Array], each: tuple[Chunks, Array, Array, Array]) -> tuple[tuple[Array, Array], Array]:
        chunk, mixed, log_total, gradient = each
        weights = jnp.exp(_scores(how, chunk.query, key, chunk.positions, reach) - log_total)
        known = Known(chunk.query, weights, jnp.ones_like(log_total), mixed, log_total)
        of_query, of_key, of_value = _gradients(how, known, key, value, chunk.rng(rng), gradient)
        return (sums[0] + of_key, sums[1] + of_value), of_query

    zeros = [jnp.zeros(x.shape, x.dtype, out_sharding=cotangent_spec(x)) for x in (key, value)]
    sums, of_queries = jax.lax.scan(back, (zeros[0], zeros[1]), (chunks, mixed, log_total, gradient))
    return Chunks(of_queries, None, None), *sums, None, None  # type: ignore[arg-type]


_mixed_by_chunk.defvjp(_forward_by_chunk, _backward_by_chunk)


def _scores(how: Scoring, query: Array, key: Array, positions: Array, reach: Array | None) -> Array:
    """The scores [b, k, g, s, t] in float32, minus infinity where a query does not attend to a key.

    The mask follows from positions alone, and what it puts in from nothing: JAX would make both of all chunks and heads
    before the first layer (JAX 0.10.2), the mask as large as all scores. So positions wait for the query, by an
    optimization barrier, and what is masked is one array of queries and keys.
    """
    query, positions = jax.lax.optimization_barrier((query, positions))
    scores = jnp.einsum("bkgsh,btkh->bkgst", _by_head(query), key, preferred_element_type=jnp.float32) / how.divisor
    if how.softcap:
        scores = how.softcap * jnp.tanh(scores / how.softcap)
    distance = positions[:, None] - jnp.arange(key.shape[1])[None, :]
    visible = distance >= 0
    if reach is not None:
        visible &= distance < reach
    return scores + lax.broadcast_to_rank(jnp.where(visible, 0.0, -jnp.inf), scores.ndim)


def _mix(weights: Array, total: Array, value: Array, rng: DropoutRng | None, dtype: Any) -> Array:
    """The values mixed by weights [b, k, g, s, t] that are still to be divided by their sums `total`."""
    kept = dropout_of_weights(weights, rng).astype(value.dtype)
    mixed = jnp.einsum("bkgst,btkh->bkgsh", kept, value, preferred_element_type=jnp.float32) / total
    return _by_token(mixed.astype(dtype))


def _gradients(
    how: Scoring, known: Known, key: Array, value: Array, rng: DropoutRng | None, gradient: Array
) -> tuple[Array, Array, Array]:
    """The gradients of queries, keys and values."""
    query, weights, total, mixed, top = known
    # As einsum: XLA:CPU takes six times as long to multiply and add up where the batch is 1 (JAX 0.10.2).
    inner = jnp.einsum("bskgh,bskgh->bskg", gradient, mixed, preferred_element_type=jnp.float32)
    inner = _by_head(inner[..., None])
    gradient = _by_head(gradient)
    of_kept = jnp.einsum("bkgsh,btkh->bkgst", gradient, value, preferred_element_type=jnp.float32)
    scale = 1 / (total * how.divisor)
    of_scores = weights * ((dropout_of_weights(of_kept, rng) - inner) * scale)
    if how.softcap and top is not None:
        # The derivative of the cap is 1 - (score / cap)^2; a weight of 0 has no score, and no gradient either.
        score = jnp.where(weights > 0, jnp.log(weights) + top, 0.0)
        of_scores *= 1 - (score / how.softcap) ** 2
    of_scores = of_scores.astype(key.dtype)
    kept = dropout_of_weights(weights, rng).astype(value.dtype)
    return (
        _by_token(jnp.einsum("bkgst,btkh->bkgsh", of_scores, key)),
        _over_queries(_by_head(query), of_scores, key),
        _over_queries((gradient / total).astype(value.dtype), kept, value),
    )


def _over_queries(x: Array, weights: Array, to: Array) -> Array:
    """The sum over queries of x [b, k, g, s, h] by weights [b, k, g, s, t], as the cotangent of `to` [b, t, k, h].

    In this order the product reads the weights as they lie; asked for the last, einsum has them transposed.
    """
    spec = cotangent_spec(to)
    dims: tuple[Any, ...] = spec.partitions
    b, t, k, h = dims
    summed = jnp.einsum("bkgsh,bkgst->bkht", x, weights, out_sharding=P(b, k, h, t, unreduced=spec.unreduced))
    return jnp.einsum("bkht->btkh", summed)


def _by_head(x: Array) -> Array:
    """An array [b, s, k, g, h] as [b, k, g, s, h], from which products make scores in the order they are read in."""
    return jnp.moveaxis(x, 1, 3)


def _by_token(x: Array) -> Array:
    """An array [b, k, g, s, h] as [b, s, k, g, h]."""
    return jnp.moveaxis(x, 3, 1)
