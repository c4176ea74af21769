"""Attention over a sharded sequence without a ring: Ulysses, or gathered keys and values.

Ulysses (arXiv:2309.14509) exchanges heads for tokens with an all-to-all, so that each device attends over whole
sequences with a share of the heads, and exchanges back. With K kv heads and H query heads over P devices, it sends
(H + K) / (K P) times the bytes of gathering keys and values. Gathering keys and values (Llama 3's context parallelism,
arXiv:2407.21783, section 3.3.2) works with any number of heads and any order of tokens. Call both inside
`jax.shard_map`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from meshwright.execution.runtime.attention.blockwise import ATTENTION_RESIDUALS, Keys
from meshwright.execution.runtime.attention.kernels import Kernel, chunked_attention, full_sequence_attention
from meshwright.execution.runtime.attention.segments import Mask, Segments


def ulysses_attention(
    query: Array, key: Array, value: Array, ids: Array | None, axis: str, mask: Mask, *, kernel: Kernel
) -> Array:
    """Return attention of this device's queries [b, s, k, g, h] over the keys and values of all devices of a mesh axis.

    There are four all-to-alls in forward and four in backward.

    Args:
      key, value: this device's keys and values [b, s, k, h]; the axis's degree must divide k.
      ids: document ids of all tokens of the axis, in order; None if each row is one document.
    """
    query, key, value = (
        checkpoint_name(jax.lax.all_to_all(x, axis, split_axis=2, concat_axis=1, tiled=True), ATTENTION_RESIDUALS)
        for x in (query, key, value)
    )
    segments = None if ids is None else segments_in_rows(np.arange(query.shape[1]), ids)
    mixed = full_sequence_attention(query, key, value, segments, mask, kernel=kernel)
    return jax.lax.all_to_all(mixed, axis, split_axis=1, concat_axis=2, tiled=True)


def gathered_attention(
    query: Array,
    key: Array,
    value: Array,
    ids: Array | None,
    key_ids: Array | None,
    axis: str,
    mask: Mask,
    *,
    kernel: Kernel,
    order: np.ndarray | None = None,
) -> Array:
    """Like `ulysses_attention`, but with keys and values gathered over the axis: any number of heads, any token order.

    Args:
      ids: document ids of this device's tokens; None if each row is one document.
      key_ids: document ids of all tokens of the axis, in the order in which they are stored.
      kernel: the kernel that attends over the gathered keys.
      order: the position of each token of the axis, as they are stored; None if they are stored in order.
    """
    length, here = query.shape[1], jax.lax.axis_index(axis)
    places = np.arange(length * jax.lax.axis_size(axis)) if order is None else order
    own = jax.lax.dynamic_slice_in_dim(jnp.asarray(places), here * length, length)
    key, value = (
        checkpoint_name(jax.lax.all_gather(x, axis, axis=1, tiled=True), ATTENTION_RESIDUALS) for x in (key, value)
    )
    keys = Keys(key, value, segments_in_rows(places, key_ids))
    return chunked_attention(query, segments_in_rows(own, ids), keys, mask, kernel=kernel)


def segments_in_rows(places: Array | np.ndarray, ids: Array | None) -> Segments:
    """Return segments whose positions are the indices `places` [s] of tokens in their row, not in their document.

    Masks depend only on differences of positions, and within a document the differences of both are equal.
    """
    places = jnp.asarray(places, jnp.int32)[None]
    return Segments(places) if ids is None else Segments(jnp.broadcast_to(places, ids.shape), ids)
