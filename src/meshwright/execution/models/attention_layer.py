"""Attention of one layer: with a fused kernel, with scores in memory, or over a cache."""

from __future__ import annotations

import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

from meshwright.description.step.layer import Attention
from meshwright.description.step.strategy import Strategy
from meshwright.errors import MeshwrightError
from meshwright.execution.models.attention import Documents, Scoring, attend
from meshwright.execution.models.context import LayerContext
from meshwright.execution.models.generation.cache import Cache
from meshwright.execution.models.generation.cached_attention import write_and_attend
from meshwright.execution.models.generation.paged_cache import PagedCache
from meshwright.execution.models.generation.stationary import attention_layout
from meshwright.execution.models.remat import INTERMEDIATE
from meshwright.execution.models.rotary import is_of_kind
from meshwright.execution.runtime.attention import sequence
from meshwright.execution.runtime.attention.segments import Mask
from meshwright.execution.runtime.sharding_context import ShardingContext


def attention_layer(
    query: Array, new: Cache | None, sinks: Array | None, op: Attention, context: LayerContext
) -> tuple[Array, Cache | PagedCache]:
    """Return the attention output of queries [b, s, k, g, h], and `new`, or in generation the updated cache.

    Args:
        new: keys and values [b, s, k, h] of the queries' tokens. With a cache in `context`, they are written to it
          first, and the cache of all layers with this window is returned; None if an earlier layer has written them.
        sinks: logits [k, g], added to the denominator of each softmax without a value.
    """
    if context.cache is not None:
        assert isinstance(context.cache, Cache | PagedCache), "a state of linear attention"
        (window,) = op.windows
        return write_and_attend(
            *(query, new, context.cache, context.cache_layer, context.positions.numbers, context.layout),
            *(scoring_of(op), window),
            sinks=sinks,
        )
    assert new is not None, "keys and values of an earlier layer are those of the whole prompt"
    layout = context.layout
    if layout.cache_split is not None:
        # In prompts each device has all keys, and its share of the queries.
        context = replace(context, layout=attention_layout(layout, is_latent=op.latent is not None))
        new = Cache(*(layout.place(array, "batch", "sequence", "kv_heads", "head_dim") for array in new))
    if context.strategy.attention != "scores":
        mixed = checkpoint_name(_fused(query, new, op, context), INTERMEDIATE)
    else:
        mixed = _with_scores(query, new, sinks, op, context)
    if layout.cache_split is not None:
        heads = jax.typeof(mixed).sharding.spec.partitions[2:]
        mixed = jax.reshard(mixed, P(*layout.spec("batch", "sequence").partitions, *heads))
    return mixed, new


def scoring_of(op: Attention) -> Scoring:
    """Return how scores of queries and keys are scaled and capped."""
    return Scoring(math.sqrt(op.qk_dim) if op.scale is None else 1 / op.scale, op.softcap, op.is_chunked)


def _fused(query: Array, new: Cache, op: Attention, context: LayerContext) -> Array:
    """Return the attention output of a fused kernel; layers with different windows take different branches."""
    segments, strategy = context.positions.segments, context.strategy
    if op.softcap:
        raise MeshwrightError(f"attention={strategy.attention!r} has no cap of scores; use attention='scores'")
    if op.scale is not None:
        # Kernels multiply scores by 1 / sqrt(h).
        query = (query * (op.scale * math.sqrt(op.qk_dim))).astype(query.dtype)

    # Without segments (prompts) tokens are in order.
    order = None if segments is None else sequence.token_order(query.shape[1], context.layout, strategy)

    def mask_within(window: int | None) -> sequence.LayerMask:
        own, key_ids = segments, context.positions.key_ids
        mask = Mask(window=window, is_chunked=op.is_chunked)
        if op.is_chunked and window is not None and own is not None and own.ids is not None:
            ids, key_ids = chunk_ids(own.positions, own.ids, key_ids, window, order)
            own, mask = own._replace(ids=ids), Mask()
        return sequence.LayerMask(mask, own, key_ids)

    windows, kind = tuple(dict.fromkeys(op.windows)), None
    if len(windows) > 1:
        of_kind = (is_of_kind(window, op.windows, context.layer).astype(jnp.int32) for window in windows)
        kind = sum((number * share for number, share in enumerate(of_kind)), jnp.int32(0))
    return sequence.attend(
        query,
        *new,
        context.layout,
        masks=[mask_within(window) for window in windows],
        kind=kind,
        order=order,
        method=strategy.sp_method,
        attention=strategy.attention,
    )


def chunk_ids(
    positions: Array, ids: Array, key_ids: Array | None, chunk: Array | int, order: np.ndarray | None = None
) -> tuple[Array, Array | None]:
    """Return ids [b, s] and key ids [b, t] that differ for each chunk of each document of a packed row.

    Attention within equal ids is then attention within chunks. Chunks are counted from a document's first token,
    wherever it is in its row.

    Args:
        positions: positions of tokens in their documents [b, s].
        ids: document ids of the tokens [b, s].
        key_ids: document ids of all keys of a row [b, t] in storage order; None if keys are the same tokens as queries,
          and then the second result is None.
        chunk: tokens of a chunk.
        order: the position in its row of each stored token [s]; None if tokens are in order.
    """
    most = ids.shape[1] // chunk + 1
    own = ids * most + positions // chunk
    if key_ids is None:
        return own, None
    # Whole rows are on every device: a token's position is its distance from its document's first token.
    in_order = key_ids if order is None else key_ids[:, np.argsort(order)]
    places = jnp.broadcast_to(jnp.arange(in_order.shape[1], dtype=jnp.int32), in_order.shape)
    is_first = jnp.concatenate([in_order[:, :1] == in_order[:, :1], in_order[:, 1:] != in_order[:, :-1]], axis=1)
    first = jax.lax.cummax(jnp.where(is_first, places, 0), axis=1)
    ids = in_order * most + (places - first) // chunk
    return own, ids if order is None else ids[:, order]


def _with_scores(query: Array, new: Cache, sinks: Array | None, op: Attention, context: LayerContext) -> Array:
    """Return the output of attention that materializes its scores, over gathered keys of the whole sequence."""
    segments, layout = context.positions.segments, context.layout
    window = _window_of_layer(op, query.shape[1], context.layer)
    documents = None
    if segments is not None:
        if segments.ids is None:
            raise MeshwrightError(
                "a batch with positions alone needs attention='flash'; 'scores' takes tokens in order"
            )
        all_ids = context.positions.key_ids
        ids = segments.ids
        if op.is_chunked and window is not None:
            ids, all_ids = chunk_ids(segments.positions, ids, all_ids, window)
            window = None
        documents = Documents(ids, ids if all_ids is None else all_ids)
    key, value = (checkpoint_name(array, INTERMEDIATE) for array in whole_keys(new, layout, context.strategy))
    return attend(
        query,
        key,
        value,
        jnp.arange(query.shape[1]),
        context.rng,
        scoring=scoring_of(op),
        window=window,
        sinks=sinks,
        documents=documents,
    )


def whole_keys(new: Cache, layout: ShardingContext, strategy: Strategy) -> Cache:
    """Return keys and values [b, s, k, h] of the whole sequence if attention materializes its scores, else unchanged.

    Gathered ones are unchanged, so that layers that share keys gather them once. Their gradient is summed over sp.
    """
    if strategy.attention != "scores":
        return new
    whole = ("batch", "activation", "kv_heads", "head_dim")
    return Cache(*(layout.place(array, *whole, reduced=layout.axes("sequence")) for array in new))


def _window_of_layer(op: Attention, length: int, layer: Array | int | None) -> Array | int | None:
    """Return the window of one layer of a stack, in keys; None if all windows are at least `length` keys."""
    windows = [length if window is None else min(window, length) for window in op.windows]
    if min(windows) == length:
        return None
    if len(set(windows)) == 1:
        return windows[0]
    return sum(window * is_of_kind(window, windows, layer).astype(jnp.int32) for window in dict.fromkeys(windows))
