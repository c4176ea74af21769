"""Attention on a mesh whose axis sp may split the sequence: the method that brings keys to queries, and the kernel."""

from __future__ import annotations

from functools import partial

import jax
import numpy as np
from jax import Array

from meshwright.mesh import check_divides
from meshwright.runtime.blockwise import Keys
from meshwright.runtime.kernels import Kernel, in_order, kernel_of, kernel_of_parts, parts_attention, whole_attention
from meshwright.runtime.layout import Layout
from meshwright.runtime.places import Mask, Places
from meshwright.runtime.ring_attention import zigzag
from meshwright.runtime.shards import on_shards
from meshwright.runtime.ulysses import gathered_attention, ulysses_attention
from meshwright.workload import Attention, SequenceMethod, Strategy, is_zigzag

QUERIES = ("batch", "sequence", "kv_heads", "group", "head_dim")
KEYS = ("batch", "sequence", "kv_heads", "head_dim")
TOKENS = ("batch", "sequence")


def attend(
    query: Array,
    key: Array,
    value: Array,
    places: Places | None,
    layout: Layout,
    *,
    method: SequenceMethod,
    mask: Mask,
    attention: Attention = "flash",
) -> Array:
    """Attention of queries [b, s, k, g, h] over keys and values [b, s, k, h], which lie as the rules of `layout` say.

    places: [b, s] each; None where every row is one document in order. Ulysses takes tokens in theirs, a ring and a
    gather in any. attention: the kernel, as `kernel_of` has it where a device has whole sequences, and
    `kernel_of_parts` where keys come round or are gathered. Scores never exist at once; what backward reads of the
    result is named `ATTENDED`. Returns an array that is and lies as the query. Raises where Ulysses cannot split the kv
    heads.
    """
    axes = layout.axes("sequence")
    if axes and method == "ulysses":
        check_divides("kv_heads", key.shape[2], layout.mesh, (*layout.axes("kv_heads"), *axes))
    if axes and method != "ulysses":
        kernel = kernel_of_parts(query.shape[1] // layout.mesh.degree(axes))
    else:
        kernel = kernel_of(attention, query, query.shape[1], places, mask)
    queries, keys, tokens = (layout.spec(*names) for names in (QUERIES, KEYS, TOKENS))
    local = partial(_local, axes=axes, method=method, mask=mask, kernel=kernel)
    # The types of what a kernel returns do not say over which mesh axes it varies.
    sharded = on_shards(
        local, layout, in_specs=(queries, keys, keys, tokens), out_specs=queries, check_vma=kernel == "blockwise"
    )
    return sharded(query, key, value, places)


def order(length: int, layout: Layout, strategy: Strategy) -> np.ndarray | None:
    """The positions of a sequence's tokens in the order in which they lie, [length]; None where that is their own.

    Raises where a length cannot be cut for a ring in zigzag order.
    """
    return zigzag(length, layout.mesh.sp) if is_zigzag(layout.mesh, strategy) else None


def _local(
    query: Array,
    key: Array,
    value: Array,
    places: Places | None,
    *,
    axes: tuple[str, ...],
    method: SequenceMethod,
    mask: Mask,
    kernel: Kernel,
) -> Array:
    """`attend` on one device."""
    if not axes:
        return whole_attention(query, key, value, places, mask, kernel=kernel)
    (axis,) = axes
    if method == "ulysses":
        return ulysses_attention(query, key, value, places, axis, mask, kernel=kernel)
    if method == "gather":
        return gathered_attention(query, key, value, places, axis, mask, kernel=kernel)
    length = query.shape[1]
    places = places or in_order(length, length * jax.lax.axis_index(axis))
    return parts_attention(query, places, Keys(key, value, places), mask, kernel=kernel, axis=axis)
