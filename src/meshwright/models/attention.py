"""Causal attention with grouped query heads, and rotary position embedding."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

from meshwright.models.dropout import Draws, dropped_weights
from meshwright.runtime import cotangent_spec
from meshwright.runtime.blockwise import ATTENDED
from meshwright.workload import ModelConfig, can_halve_queries, num_query_chunks

INTERMEDIATE = "intermediate"
"""The name of what products read, which the remat policies `none` and `attention` keep for backward."""

PRODUCT = "product"
"""The name of the results of products, which all remat policies but `block` and `offload` keep for backward."""

SCORES = "scores"
"""The name of attention's scores, which only the remat policy `none` keeps for backward."""


class Chunks(NamedTuple):
    """Chunks of queries [n, b, c, k, g, h], their places [n, c] and, where some are drawn for, numbers [n, b, c].

    Inside a loop over chunks, one of them.
    """

    query: Array
    positions: Array
    tokens: Array | None

    def draws(self, of_all: Draws | None) -> Draws | None:
        """The draws of one chunk."""
        return None if of_all is None or self.tokens is None else replace(of_all, tokens=self.tokens)


class Known(NamedTuple):
    """What forward knows of queries: they, weights [b, k, g, s, t] to be divided by their sums `total`, the output."""

    query: Array
    weights: Array
    total: Array
    mixed: Array


class Turns(NamedTuple):
    """What rotary embedding (arXiv:2104.09864) turns pairs of a head by: [b, s, head_dim / 2], b 1 where rows agree."""

    cos: Array
    sin: Array


def turns(positions: Array, model: ModelConfig) -> Turns:
    """The turns at positions [s], or [b, s] where rows differ."""
    angles = jnp.atleast_2d(positions)[..., None].astype(jnp.float32) * _frequencies(model)
    return Turns(jnp.cos(angles), jnp.sin(angles))


def rotate(x: Array, by: Turns) -> Array:
    """Rotary embedding of x [b, s, ..., head_dim].

    The two halves of a head turn together, as in the published Llama weights.
    """
    heads = range(2, x.ndim - 1)
    cos, sin = jnp.expand_dims(by.cos, heads), jnp.expand_dims(by.sin, heads)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


def _frequencies(model: ModelConfig) -> Array:
    """The angle a position adds, for each pair of a head [head_dim / 2]."""
    frequencies = model.rope_theta ** (-jnp.arange(0, model.head_dim, 2, dtype=jnp.float32) / model.head_dim)
    scaling = model.rope_scaling
    if scaling is None:
        return frequencies
    # Long waves are slowed by `factor`, short ones are left, those between are blended.
    turns = scaling.original_max_seq_len * frequencies / (2 * math.pi)
    blend = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    blend = jnp.clip(blend, 0.0, 1.0)
    return frequencies * (blend + (1 - blend) / scaling.factor)


def attend(query: Array, key: Array, value: Array, positions: Array, draws: Draws | None = None) -> Array:
    """Causal attention: query [b, s, kv_heads, group, head_dim] over key, value [b, t, kv_heads, head_dim].

    `positions` [s] are the places of the queries among the t keys, which start at 0; a query sees keys up to its own.
    As many queries as keys are a whole sequence in order.
    Scores and softmax are float32; `draws` say which weights are dropped. Returns an array of the query's shape and
    dtype, named `INTERMEDIATE`.
    """
    num_chunks = num_query_chunks(query.shape[1])
    if num_chunks == 1:
        return _mixed_by_half(query, key, value, positions, draws)
    # Chunk j takes every num_chunks-th query from j: so a sequence split over a mesh axis is split evenly in each.
    b, s, *heads = query.shape
    chunks = jnp.moveaxis(query.reshape(b, s // num_chunks, num_chunks, *heads), 2, 0)
    places = jnp.moveaxis(positions.reshape(s // num_chunks, num_chunks), 1, 0)
    tokens = draws and jnp.moveaxis(draws.tokens.reshape(b, s // num_chunks, num_chunks), 2, 0)
    mixed = _mixed_by_chunk(Chunks(chunks, places, tokens), key, value, draws)
    return checkpoint_name(jnp.moveaxis(mixed, 0, 2).reshape(query.shape), INTERMEDIATE)


def _mixed_by_half(query: Array, key: Array, value: Array, positions: Array, draws: Draws | None) -> Array:
    """`_mixed`, each half of a whole sequence for itself: the first sees no key of the second, a quarter of all scores.

    In more parts still less is made, in products so small that little is won.
    """
    length = query.shape[1]
    # Shards of a sequence are one program, in which none may leave out what another needs.
    is_whole = length == key.shape[1] and jax.typeof(query).sharding.spec[1] is None

    def mixed(start: int, stop: int) -> Array:
        own = draws and replace(draws, tokens=draws.tokens[:, start:stop])
        return _mixed(query[:, start:stop], key[:, :stop], value[:, :stop], positions[start:stop], own)

    if not (is_whole and can_halve_queries(length)):
        return _mixed(query, key, value, positions, draws)
    return jnp.concatenate([mixed(0, length // 2), mixed(length // 2, length)], axis=1)


@jax.custom_vjp
def _mixed(query: Array, key: Array, value: Array, positions: Array, draws: Draws | None) -> Array:
    """The values that queries mix by the softmax of their scores, [b, s, k, g, h].

    Backward is written out because JAX's own goes through arrays of scores [b, k, g, s, t], the largest of all, twice
    as often. Here what they mix is divided by their sums instead of them; the softmax's inner product is that of the
    output with its gradient (FlashAttention, arXiv:2205.14135, appendix B.2); and no product has them transposed.
    """
    return _forward(query, key, value, positions, draws)[0]


def _forward(
    query: Array, key: Array, value: Array, positions: Array, draws: Draws | None
) -> tuple[Array, tuple[Any, ...]]:
    """The output, and what backward needs."""
    scores = _scores(query, key, positions)
    weights = checkpoint_name(jnp.exp(scores - jnp.max(scores, axis=-1, keepdims=True)), SCORES)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    mixed = checkpoint_name(_mix(weights, total, value, draws, query.dtype), INTERMEDIATE)
    return mixed, (Known(query, weights, total, mixed), key, value, draws)


def _backward(saved: tuple[Any, ...], gradient: Array) -> tuple[Array, Array, Array, None, None]:
    """The gradients of queries, keys and values."""
    known, key, value, draws = saved
    return *_gradients(known, key, value, draws, gradient), None, None


_mixed.defvjp(_forward, _backward)


@jax.custom_vjp
def _mixed_by_chunk(chunks: Chunks, key: Array, value: Array, draws: Draws | None) -> Array:
    """`_mixed` of one chunk of queries after the other, [n, b, c, k, g, h]: backward makes the scores of each again."""
    return _forward_by_chunk(chunks, key, value, draws)[0]


def _forward_by_chunk(chunks: Chunks, key: Array, value: Array, draws: Draws | None) -> tuple[Array, tuple[Any, ...]]:
    """The output, and what backward needs: no scores, but the logarithm of each softmax's sum."""

    def mix(chunk: Chunks) -> tuple[Array, Array]:
        scores = _scores(chunk.query, key, chunk.positions)
        top = jnp.max(scores, axis=-1, keepdims=True)
        weights = jnp.exp(scores - top)
        total = jnp.sum(weights, axis=-1, keepdims=True)
        return _mix(weights, total, value, chunk.draws(draws), chunk.query.dtype), top + jnp.log(total)

    mixed, log_total = checkpoint_name(jax.lax.map(mix, chunks), ATTENDED)
    return mixed, (chunks, key, value, draws, mixed, log_total)


def _backward_by_chunk(saved: tuple[Any, ...], gradient: Array) -> tuple[Chunks, Array, Array, None]:
    """The gradients of queries, keys and values, those of the last two added up chunk by chunk."""
    chunks, key, value, draws, mixed, log_total = saved

    def back(sums: tuple[Array, Array], each: tuple[Chunks, Array, Array, Array]) -> tuple[tuple[Array, Array], Array]:
        chunk, mixed, log_total, gradient = each
        weights = jnp.exp(_scores(chunk.query, key, chunk.positions) - log_total)
        known = Known(chunk.query, weights, jnp.ones_like(log_total), mixed)
        of_query, of_key, of_value = _gradients(known, key, value, chunk.draws(draws), gradient)
        return (sums[0] + of_key, sums[1] + of_value), of_query

    zeros = [jnp.zeros(x.shape, x.dtype, out_sharding=cotangent_spec(x)) for x in (key, value)]
    sums, of_queries = jax.lax.scan(back, (zeros[0], zeros[1]), (chunks, mixed, log_total, gradient))
    return Chunks(of_queries, None, None), *sums, None  # type: ignore[arg-type]


_mixed_by_chunk.defvjp(_forward_by_chunk, _backward_by_chunk)


def _scores(query: Array, key: Array, positions: Array) -> Array:
    """The scores [b, k, g, s, t] in float32, minus infinity where a query does not see a key.

    The mask follows from places alone, and what it puts in from nothing: JAX would make both of all chunks and heads
    before the first layer (JAX 0.10.2), the mask as large as all scores. So places are not to be had before the query,
    and what is masked is one array of queries and keys.
    """
    query, positions = jax.lax.optimization_barrier((query, positions))
    scores = jnp.einsum("bkgsh,btkh->bkgst", _by_head(query), key, preferred_element_type=jnp.float32)
    visible = positions[:, None] >= jnp.arange(key.shape[1])[None, :]
    return scores / math.sqrt(query.shape[-1]) + jnp.where(visible, 0.0, -jnp.inf)


def _mix(weights: Array, total: Array, value: Array, draws: Draws | None, dtype: Any) -> Array:
    """The values mixed by weights [b, k, g, s, t] that are still to be divided by their sums `total`."""
    kept = dropped_weights(weights, draws).astype(value.dtype)
    mixed = jnp.einsum("bkgst,btkh->bkgsh", kept, value, preferred_element_type=jnp.float32) / total
    return _by_token(mixed.astype(dtype))


def _gradients(
    known: Known, key: Array, value: Array, draws: Draws | None, gradient: Array
) -> tuple[Array, Array, Array]:
    """The gradients of queries, keys and values."""
    query, weights, total, mixed = known
    # As einsum: XLA:CPU takes six times as long to multiply and add up where the batch is 1 (JAX 0.10.2).
    inner = jnp.einsum("bskgh,bskgh->bskg", gradient, mixed, preferred_element_type=jnp.float32)
    inner = _by_head(inner[..., None])
    gradient = _by_head(gradient)
    of_kept = jnp.einsum("bkgsh,btkh->bkgst", gradient, value, preferred_element_type=jnp.float32)
    scale = 1 / (total * math.sqrt(query.shape[-1]))
    of_scores = (weights * ((dropped_weights(of_kept, draws) - inner) * scale)).astype(key.dtype)
    kept = dropped_weights(weights, draws).astype(value.dtype)
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
