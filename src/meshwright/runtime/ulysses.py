"""Attention over a split sequence by bringing it together: all tokens for a share of the heads, or all keys for all.

Ulysses (arXiv:2309.14509) exchanges heads for tokens in an all-to-all, has whole sequences of a share of the heads, and
exchanges back; it moves (H + K) / K / P as much as gathering keys and values of K kv heads for H query heads over P
devices does. Gathered keys and values (as in Llama 3's context parallelism, arXiv:2407.21783, section 3.3.2) set no
condition on heads, nor on the order of tokens. Both are to be called inside `jax.shard_map`.
"""

from __future__ import annotations

import jax
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from meshwright.runtime.blockwise import ATTENDED, Keys
from meshwright.runtime.kernels import Kernel, in_order, parts_attention, whole_attention
from meshwright.runtime.places import Mask, Places


def ulysses_attention(
    query: Array, key: Array, value: Array, places: Places | None, axis: str, mask: Mask, *, kernel: Kernel
) -> Array:
    """Attention of this device's queries [b, s, k, g, h] over the keys and values [b, s, k, h] of a whole axis.

    The axis's degree has to divide k. Four all-to-alls forward, and four backward. places: as in `whole_attention`.
    """
    query, key, value = (
        checkpoint_name(jax.lax.all_to_all(x, axis, split_axis=2, concat_axis=1, tiled=True), ATTENDED)
        for x in (query, key, value)
    )
    mixed = whole_attention(query, key, value, _gathered(places, axis), mask, kernel=kernel)
    return jax.lax.all_to_all(mixed, axis, split_axis=1, concat_axis=2, tiled=True)


def gathered_attention(
    query: Array, key: Array, value: Array, places: Places | None, axis: str, mask: Mask, *, kernel: Kernel
) -> Array:
    """The same with keys and values gathered over the axis; any number of heads, and tokens in any order."""
    length = query.shape[1]
    here = places or in_order(length, length * jax.lax.axis_index(axis))
    there = _gathered(places, axis) or in_order(length * jax.lax.axis_size(axis))
    key, value = (checkpoint_name(jax.lax.all_gather(x, axis, axis=1, tiled=True), ATTENDED) for x in (key, value))
    return parts_attention(query, here, Keys(key, value, there), mask, kernel=kernel)


def _gathered(places: Places | None, axis: str) -> Places | None:
    """The places of all tokens of the axis."""
    return jax.tree.map(lambda x: jax.lax.all_gather(x, axis, axis=1, tiled=True), places)
