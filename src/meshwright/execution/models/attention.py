"""Causal attention with grouped query heads that materializes its scores in memory.

Dims: b batch, s queries, t keys, k kv heads, g query heads per kv head, h head dim; n chunks of c queries.
"""

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
from jax.sharding import reshard

from meshwright.description.step.workload import can_halve_queries, num_query_chunks
from meshwright.execution.models.dropout import DropoutRng, dropout_of_weights
from meshwright.execution.models.remat import INTERMEDIATE, SCORES
from meshwright.execution.runtime.attention.blockwise import ATTENTION_RESIDUALS
from meshwright.execution.runtime.sharding_context import cotangent_spec


class Scoring(NamedTuple):
    """How scores are computed: query . key / divisor, then softcap * tanh(score / softcap) if there is a softcap.

    is_chunked: whether positions are split into chunks of `window`, and a query attends only to keys of its own chunk
    (as in `AttentionConfig`).
    """

    divisor: float
    softcap: float | None = None
    is_chunked: bool = False

    def of_products(self, products: Array) -> Array:
        """Return the scores of products of queries and keys: divided, and limited by the softcap if there is one."""
        scores = products / self.divisor
        return self.softcap * jnp.tanh(scores / self.softcap) if self.softcap else scores

    def is_within(self, distance: Array, positions: Array, window: Array | int) -> Array:
        """Whether a key `distance` positions before a query at `positions` is in the query's window or chunk."""
        return distance <= positions % window if self.is_chunked else distance < window


class Documents(NamedTuple):
    """The ids of the documents of queries [b, s] and of keys [b, t]; a query attends to keys of its own document."""

    queries: Array
    keys: Array

    def part(self, queries: slice, keys: slice) -> Documents:
        """Return the ids of slices of the queries and keys."""
        return Documents(self.queries[:, queries], self.keys[:, keys])


class Chunks(NamedTuple):
    """Queries [n, b, c, k, g, h] in n chunks, and their positions [n, c]; in a loop over chunks, arrays have no dim n.

    tokens: numbers of the tokens in the batch [n, b, c], for dropout; None without dropout. sinks: sink logits of each
    query [n, b, c, k, g]; None without sinks. ids: document ids of the queries [n, b, c]; None if each row is one
    document.
    """

    query: Array
    positions: Array
    tokens: Array | None
    sinks: Array | None
    ids: Array | None

    def documents(self, key_ids: Array | None) -> Documents | None:
        """Return the document ids of one chunk's queries and of all keys; None if each row is one document."""
        return None if self.ids is None or key_ids is None else Documents(self.ids, key_ids)

    def rng(self, rng: DropoutRng | None) -> DropoutRng | None:
        """Return one chunk's dropout, given the dropout of all queries; None without dropout."""
        return None if rng is None or self.tokens is None else replace(rng, tokens=self.tokens)


class ForwardResults(NamedTuple):
    """Results of forward that backward reads.

    weights: exp(score - max_score) [b, k, g, s, t], not normalized. normalizer: their sums over t [b, k, g, s, 1], with
    the sink's weight. max_score: largest score of each query [b, k, g, s, 1]; None without a softcap, whose gradient
    alone reads it. sink_weights: exp(sink - max_score) [b, k, g, s, 1]; None without sinks.
    """

    query: Array
    weights: Array
    normalizer: Array
    output: Array
    max_score: Array | None
    sink_weights: Array | None


def attend(
    query: Array,
    key: Array,
    value: Array,
    positions: Array,
    rng: DropoutRng | None = None,
    *,
    scoring: Scoring | None = None,
    window: Array | int | None = None,
    sinks: Array | None = None,
    documents: Documents | None = None,
) -> Array:
    """Causal attention that materializes its scores in memory. Scores and softmax are float32.

    Args:
        query: [b, s, kv_heads, group, head_dim]. If s = t, queries are a whole sequence in order.
        key, value: [b, t, kv_heads, head_dim], at positions from 0; values may have another head_dim.
        positions: positions of the queries [s]; a query attends to keys up to its own position.
        rng: dropout of the attention weights; None for no dropout.
        scoring: default: a divisor of sqrt(head_dim), no softcap.
        window: the number of keys a query attends to, including its own; None for all keys up to its own.
        sinks: logits [kv_heads, group], added to the denominator of each softmax without a value.
        documents: document ids of queries and keys if rows hold several documents; attention stays within a document.

    Returns:
        The output [b, s, kv_heads, group, value_dim] in the query's dtype, with the checkpoint name `INTERMEDIATE`.
    """
    scoring = scoring or Scoring(math.sqrt(query.shape[-1]))
    width = None if window is None else jnp.int32(window)
    num_chunks = num_query_chunks(query.shape[1])
    if sinks is not None:
        # Broadcast to one sink per query, so that its gradient is summed over all tokens at once, in any split.
        spec = P(*jax.typeof(query).sharding.spec[:-1])
        sinks = lax.broadcast_in_dim(sinks.astype(jnp.float32), query.shape[:-1], (2, 3), out_sharding=spec)
    if num_chunks == 1:
        return _attention_by_halves(scoring, query, key, value, positions, documents, width, rng, sinks)
    # Chunk j has queries j, j + num_chunks, ..., so that each chunk of a sharded sequence is sharded evenly.
    b, s, *heads = query.shape
    chunks = jnp.moveaxis(query.reshape(b, s // num_chunks, num_chunks, *heads), 2, 0)
    places = jnp.moveaxis(positions.reshape(s // num_chunks, num_chunks), 1, 0)
    tokens = rng and jnp.moveaxis(rng.tokens.reshape(b, s // num_chunks, num_chunks), 2, 0)
    own = None if sinks is None else jnp.moveaxis(sinks.reshape(b, s // num_chunks, num_chunks, *heads[:-1]), 2, 0)
    ids, key_ids = (None, None) if documents is None else documents
    ids = None if ids is None else jnp.moveaxis(ids.reshape(b, s // num_chunks, num_chunks), 2, 0)
    of_queries = Chunks(chunks, places, tokens, own, ids)
    output: Any = _attention_by_chunks(scoring, of_queries, key, value, key_ids, width, rng)
    return checkpoint_name(jnp.moveaxis(output, 0, 2).reshape(b, s, *output.shape[3:]), INTERMEDIATE)


def _attention_by_halves(
    scoring: Scoring,
    query: Array,
    key: Array,
    value: Array,
    positions: Array,
    documents: Documents | None,
    window: Array | None,
    rng: DropoutRng | None,
    sinks: Array | None,
) -> Array:
    """Run `_attention` on each half of the queries, so that scores of the first half with later keys are not computed.

    That skips a quarter of the scores, which are all masked; documents are in order within a row, so packed rows skip
    the same quarter. More parts would skip more, but with matmuls too small to gain time. A sequence that is split over
    devices, or too short to halve, runs as a whole.
    """
    length = query.shape[1]
    # Devices that share a sequence run one program, so no device can skip scores that another one needs.
    is_whole = length == key.shape[1] and jax.typeof(query).sharding.spec[1] is None

    def attend_part(start: int, stop: int) -> Array:
        part = slice(start, stop)
        own = rng and replace(rng, tokens=rng.tokens[:, part])
        of_part = None if sinks is None else sinks[:, part]
        ids = None if documents is None else documents.part(part, slice(stop))
        return _attention(
            scoring, query[:, part], key[:, :stop], value[:, :stop], positions[part], ids, window, own, of_part
        )

    if not (is_whole and can_halve_queries(length)):
        return _attention(scoring, query, key, value, positions, documents, window, rng, sinks)
    return jnp.concatenate([attend_part(0, length // 2), attend_part(length // 2, length)], axis=1)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(
    scoring: Scoring,
    query: Array,
    key: Array,
    value: Array,
    positions: Array,
    documents: Documents | None,
    window: Array | None,
    rng: DropoutRng | None,
    sinks: Array | None,
) -> Array:
    """Return the attention output [b, s, k, g, h], with a backward that reads the scores half as often as JAX's own.

    Scores [b, k, g, s, t] are the largest arrays. The output is normalized instead of the weights; the softmax's
    gradient uses the inner product of the output and its gradient (FlashAttention, arXiv:2205.14135, appendix B.2); no
    matmul transposes the scores. Arguments are as in `attend`, except `sinks`: [b, s, k, g], one for each query.
    """
    return _forward(scoring, query, key, value, positions, documents, window, rng, sinks)[0]


def _forward(
    scoring: Scoring,
    query: Array,
    key: Array,
    value: Array,
    positions: Array,
    documents: Documents | None,
    window: Array | None,
    rng: DropoutRng | None,
    sinks: Array | None,
) -> tuple[Array, tuple[Any, ...]]:
    scores = _scores(scoring, query, key, positions, documents, window)
    max_score = _largest(scores, sinks)
    weights = checkpoint_name(jnp.exp(scores - max_score), SCORES)
    normalizer, of_sinks = _sum_of_weights(weights, max_score, sinks)
    output = checkpoint_name(_average(weights, normalizer, value, rng, query.dtype), INTERMEDIATE)
    return output, (
        ForwardResults(query, weights, normalizer, output, max_score if scoring.softcap else None, of_sinks),
        key,
        value,
        rng,
    )


def _backward(
    scoring: Scoring, saved: tuple[Any, ...], gradient: Array
) -> tuple[Array, Array, Array, None, None, None, None, Array | None]:
    results, key, value, rng = saved
    *others, of_sinks = _gradients(scoring, results, key, value, rng, gradient)
    return *others, None, None, None, None, of_sinks  # type: ignore[return-value]


_attention.defvjp(_forward, _backward)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention_by_chunks(
    scoring: Scoring,
    chunks: Chunks,
    key: Array,
    value: Array,
    key_ids: Array | None,
    window: Array | None,
    rng: DropoutRng | None,
) -> Array:
    """Return the output [n, b, c, k, g, h] of `_attention`, in a loop over chunks of queries.

    Backward recomputes each chunk's scores. key_ids: document ids of all keys [b, t]; None if each row is one document.
    """
    return _forward_by_chunk(scoring, chunks, key, value, key_ids, window, rng)[0]


def _forward_by_chunk(
    scoring: Scoring,
    chunks: Chunks,
    key: Array,
    value: Array,
    key_ids: Array | None,
    window: Array | None,
    rng: DropoutRng | None,
) -> tuple[Array, tuple[Any, ...]]:
    """Run attention chunk by chunk, saving the log-normalizer for backward but no scores."""

    def mix(chunk: Chunks) -> tuple[Array, Array]:
        scores = _scores(scoring, chunk.query, key, chunk.positions, chunk.documents(key_ids), window)
        max_score = _largest(scores, chunk.sinks)
        weights = jnp.exp(scores - max_score)
        normalizer, _ = _sum_of_weights(weights, max_score, chunk.sinks)
        return _average(weights, normalizer, value, chunk.rng(rng), chunk.query.dtype), max_score + jnp.log(normalizer)

    output, log_normalizer = checkpoint_name(jax.lax.map(mix, chunks), ATTENTION_RESIDUALS)
    return output, (chunks, key, value, key_ids, window, rng, output, log_normalizer)


def _backward_by_chunk(
    scoring: Scoring, saved: tuple[Any, ...], gradient: Array
) -> tuple[Chunks, Array, Array, None, None, None]:
    """Return the gradients of `_attention_by_chunks`'s arguments, chunk by chunk; those of keys and values are sums."""
    chunks, key, value, key_ids, window, rng, output, log_normalizer = saved

    def back(sums: tuple[Array, Array], each: tuple[Chunks, Array, Array, Array]) -> tuple[tuple[Array, Array], Any]:
        chunk, output, log_normalizer, gradient = each
        scores = _scores(scoring, chunk.query, key, chunk.positions, chunk.documents(key_ids), window)
        weights = jnp.exp(scores - log_normalizer)
        share = None if chunk.sinks is None else jnp.exp(_by_head(chunk.sinks[..., None]) - log_normalizer)
        results = ForwardResults(chunk.query, weights, jnp.ones_like(log_normalizer), output, log_normalizer, share)
        of_query, of_key, of_value, of_sinks = _gradients(scoring, results, key, value, chunk.rng(rng), gradient)
        return (sums[0] + of_key, sums[1] + of_value), (of_query, of_sinks)

    zeros = [jnp.zeros(x.shape, x.dtype, out_sharding=cotangent_spec(x)) for x in (key, value)]
    sums, (of_queries, of_sinks) = jax.lax.scan(back, (zeros[0], zeros[1]), (chunks, output, log_normalizer, gradient))
    return Chunks(of_queries, None, None, of_sinks, None), *sums, None, None, None  # type: ignore[arg-type]


_attention_by_chunks.defvjp(_forward_by_chunk, _backward_by_chunk)


def _scores(
    scoring: Scoring,
    query: Array,
    key: Array,
    positions: Array,
    documents: Documents | None,
    window: Array | None,
) -> Array:
    """Return the scores [b, k, g, s, t] in float32, minus infinity where masked.

    The mask depends only on positions and documents, so without an optimization barrier JAX would compute it before the
    first layer for all chunks and heads, in an array as large as all scores (JAX 0.10.2). The barrier keeps the mask
    after the query; the mask is added as an array without head dims.
    """
    query, positions, documents = jax.lax.optimization_barrier((query, positions, documents))
    scores = scoring.of_products(
        jnp.einsum("bkgsh,btkh->bkgst", _by_head(query), key, preferred_element_type=jnp.float32)
    )
    # Each device computes the mask's rows for its own queries.
    positions = reshard(positions, P(jax.typeof(query).sharding.spec[1]))
    distance = positions[:, None] - jnp.arange(key.shape[1])[None, :]
    visible = distance >= 0
    if window is not None:
        visible &= scoring.is_within(distance, positions[:, None], window)
    if documents is not None:
        is_same = documents.queries[:, None, None, :, None] == documents.keys[:, None, None, None, :]
        visible = lax.broadcast_to_rank(visible, is_same.ndim) & is_same
    # `jnp.where` would materialize arrays of constants before the first layer (JAX 0.10.2).
    return scores + lax.broadcast_to_rank(jnp.log(visible.astype(jnp.float32)), scores.ndim)


def _largest(scores: Array, sinks: Array | None) -> Array:
    """Return the largest of each query's scores [b, k, g, s, t] and its sink [b, s, k, g], as [b, k, g, s, 1]."""
    largest = jnp.max(scores, axis=-1, keepdims=True)
    return largest if sinks is None else jnp.maximum(largest, _by_head(sinks[..., None]))


def _sum_of_weights(weights: Array, max_score: Array, sinks: Array | None) -> tuple[Array, Array | None]:
    """Return each query's sum of weights, including its sink's, and the weight of its sink (None without sinks).

    Both are [b, k, g, s, 1]; weights are [b, k, g, s, t].
    """
    sums = jnp.sum(weights, axis=-1, keepdims=True)
    if sinks is None:
        return sums, None
    # Saved with the weights (same name): recomputing it would need all scores.
    of_sinks = checkpoint_name(jnp.exp(_by_head(sinks[..., None]) - max_score), SCORES)
    return sums + of_sinks, of_sinks


def _average(weights: Array, normalizer: Array, value: Array, rng: DropoutRng | None, dtype: Any) -> Array:
    """Return the values averaged with weights [b, k, g, s, t] / normalizer, after dropout of the weights."""
    kept = dropout_of_weights(weights, rng).astype(value.dtype)
    output = jnp.einsum("bkgst,btkh->bkgsh", kept, value, preferred_element_type=jnp.float32) / normalizer
    return _by_token(output.astype(dtype))


def _gradients(
    scoring: Scoring, results: ForwardResults, key: Array, value: Array, rng: DropoutRng | None, gradient: Array
) -> tuple[Array, Array, Array, Array | None]:
    """Return the gradients of queries, keys, values and sinks (None without sinks), given that of the output."""
    query, weights, normalizer, output, max_score, sink_weights = results
    # An einsum: XLA:CPU takes six times as long for a multiply and a sum if the batch is 1 (JAX 0.10.2).
    inner = jnp.einsum("bskgh,bskgh->bskg", gradient, output, preferred_element_type=jnp.float32)
    inner = _by_head(inner[..., None])
    gradient = _by_head(gradient)
    of_kept = jnp.einsum("bkgsh,btkh->bkgst", gradient, value, preferred_element_type=jnp.float32)
    scale = 1 / (normalizer * scoring.divisor)
    of_scores = weights * ((dropout_of_weights(of_kept, rng) - inner) * scale)
    if scoring.softcap and max_score is not None:
        # The derivative of the softcap is 1 - (score / softcap)^2; a weight of 0 has no gradient.
        score = jnp.where(weights > 0, jnp.log(weights) + max_score, 0.0)
        of_scores *= 1 - (score / scoring.softcap) ** 2
    of_scores = of_scores.astype(key.dtype)
    kept = dropout_of_weights(weights, rng).astype(value.dtype)
    return (
        _by_token(jnp.einsum("bkgst,btkh->bkgsh", of_scores, key)),
        _over_queries(_by_head(query), of_scores, key),
        _over_queries((gradient.astype(jnp.float32) / normalizer).astype(value.dtype), kept, value),
        None if sink_weights is None else _by_token(-inner * sink_weights / normalizer)[..., 0],
    )


def _over_queries(x: Array, weights: Array, operand: Array) -> Array:
    """Return the cotangent of `operand` [b, t, k, h], by contracting x [b, k, g, s, h] with weights [b, k, g, s, t].

    All queries (g and s) are summed. The sharding is what the type of `operand` requires of its cotangent. The einsum's
    output order avoids a transposition of the weights.
    """
    spec = cotangent_spec(operand)
    dims: tuple[Any, ...] = spec.partitions
    b, t, k, h = dims
    summed = jnp.einsum("bkgsh,bkgst->bkht", x, weights, out_sharding=P(b, k, h, t, unreduced=spec.unreduced))
    return jnp.einsum("bkht->btkh", summed)


def _by_head(x: Array) -> Array:
    """Transpose [b, s, k, g, h] to [b, k, g, s, h], so that matmuls write scores in the order they are read."""
    return jnp.moveaxis(x, 1, 3)


def _by_token(x: Array) -> Array:
    """Transpose [b, k, g, s, h] to [b, s, k, g, h]."""
    return jnp.moveaxis(x, 3, 1)
