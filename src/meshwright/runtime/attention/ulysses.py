"""Attention over a sharded sequence without a ring: all tokens for some heads (Ulysses), or all keys for all heads.

Ulysses (arXiv:2309.14509) exchanges heads for tokens with an all-to-all, attends over whole sequences with a share of
the heads, and exchanges back. It moves (H + K) / K / P of the bytes of gathering keys and values, with K kv heads and H
query heads over P devices. Gathered keys and values (Llama 3's context parallelism, arXiv:2407.21783, section 3.3.2)
need no divisibility of heads and no order of tokens. Both are called inside `jax.shard_map`.
"""

from __future__ import annotations

import jax
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from meshwright.runtime.attention.blockwise import ATTENTION_RESIDUALS, Keys
from meshwright.runtime.attention.kernels import Kernel, chunked_attention, full_sequence_attention, sequential_segments
from meshwright.runtime.attention.segments import Mask, Segments


def ulysses_attention(
    query: Array, key: Array, value: Array, segments: Segments | None, axis: str, mask: Mask, *, kernel: Kernel
) -> Array:
    """Attention of this device's queries [b, s, k, g, h] over the keys and values [b, s, k, h] of the whole axis.

    The axis's degree must divide k. Four all-to-alls forward and four backward. segments: as in
    `full_sequence_attention`.
    """
    query, key, value = (
        checkpoint_name(jax.lax.all_to_all(x, axis, split_axis=2, concat_axis=1, tiled=True), ATTENTION_RESIDUALS)
        for x in (query, key, value)
    )
    mixed = full_sequence_attention(query, key, value, _gathered(segments, axis), mask, kernel=kernel)
    return jax.lax.all_to_all(mixed, axis, split_axis=1, concat_axis=2, tiled=True)


def gathered_attention(
    query: Array, key: Array, value: Array, segments: Segments | None, axis: str, mask: Mask, *, kernel: Kernel
) -> Array:
    """The same with keys and values gathered over the axis: any number of heads, tokens in any order."""
    length = query.shape[1]
    here = segments or sequential_segments(length, length * jax.lax.axis_index(axis))
    there = _gathered(segments, axis) or sequential_segments(length * jax.lax.axis_size(axis))
    key, value = (
        checkpoint_name(jax.lax.all_gather(x, axis, axis=1, tiled=True), ATTENTION_RESIDUALS) for x in (key, value)
    )
    return chunked_attention(query, here, Keys(key, value, there), mask, kernel=kernel)


def _gathered(segments: Segments | None, axis: str) -> Segments | None:
    return jax.tree.map(lambda x: jax.lax.all_gather(x, axis, axis=1, tiled=True), segments)
