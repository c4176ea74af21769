"""Attention on a mesh that may shard the sequence over sp: run the method, and choose its kernel."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import Array
from jax.sharding import PartitionSpec as P

from meshwright.description.step.sequence import is_zigzag
from meshwright.description.step.strategy import Attention, SequenceMethod, Strategy
from meshwright.execution.runtime.attention.blockwise import Keys
from meshwright.execution.runtime.attention.kernels import (
    Kernel,
    chunked_attention,
    full_sequence_attention,
    select_kernel,
    select_kernel_for_chunks,
    sequential_segments,
)
from meshwright.execution.runtime.attention.ring import zigzag
from meshwright.execution.runtime.attention.segments import Mask, Segments
from meshwright.execution.runtime.attention.ulysses import gathered_attention, ulysses_attention
from meshwright.execution.runtime.sharding_context import ShardingContext
from meshwright.execution.runtime.shards import on_shards
from meshwright.mesh import check_divides

QUERIES = ("batch", "sequence", "kv_heads", "group", "head_dim")
KEYS = ("batch", "sequence", "kv_heads", "head_dim")
TOKENS = ("batch", "sequence")


class LayerMask(NamedTuple):
    """Which keys the queries of a layer attend to.

    mask: by their distance. segments: positions and document ids, [b, s] each; None if every row is one document in
    order. key_ids: document ids of whole rows [b, s], on every device; read by Ulysses and gather if sp splits the
    sequence.
    """

    mask: Mask
    segments: Segments | None = None
    key_ids: Array | None = None


def attend(
    query: Array,
    key: Array,
    value: Array,
    layout: ShardingContext,
    *,
    method: SequenceMethod,
    masks: Sequence[LayerMask],
    kind: Array | None = None,
    attention: Attention = "flash",
    order: np.ndarray | None = None,
) -> Array:
    """Return attention of queries [b, s, k, g, h] over keys and values [b, s, k, h], sharded by the rules of `layout`.

    The full score matrix is never materialized. Residuals have the checkpoint name `ATTENTION_RESIDUALS`.

    Args:
      query: [b, s, k, g, h] with g query heads for each of k kv heads.
      key: [b, s, k, h]; keys and values may be replicated over sp, and then tokens are in order.
      value: [b, s, k, h]; h may differ from that of the keys.
      layout: mesh and rules.
      method: how keys reach queries over sp. Ulysses needs tokens in order; ring and gather take any order.
      masks: which keys a query attends to; of layers of several kinds, those of each kind. A kernel needs its mask at
        compile time, so each kind is a branch.
      kind: the index in `masks` of this layer's kind, a scalar; None if there is one mask. Pipeline stages, each with a
        kind of its own, take different branches, which then must not communicate: sp is 1.
      attention: the kernel, see `select_kernel` and `select_kernel_for_chunks`.
      order: the position in its row of each stored token [s], see `token_order`; None if tokens are stored in order.

    Returns:
      An array with the shape, dtype and sharding of the query, but the head dim of the values.

    Raises:
      MeshwrightError: Ulysses cannot split the kv heads.
    """
    axes = layout.axes("sequence")
    has_all_keys = bool(axes) and jax.typeof(key).sharding.spec[1] is None
    if axes and method == "ulysses":
        check_divides("kv_heads", key.shape[2], layout.mesh, (*layout.axes("kv_heads"), *axes))
    if axes and method != "ulysses":
        kernel = select_kernel_for_chunks(query.shape[1] // layout.mesh.degree(axes))
    else:
        length = query.shape[1]
        kernels: set[Kernel] = {select_kernel(attention, query, length, own.segments, own.mask) for own in masks}
        (kernel,) = kernels
    queries, keys, tokens = (layout.spec(*names) for names in (QUERIES, KEYS, TOKENS))
    if has_all_keys:
        keys = P(keys[0], None, *keys[2:])
    local = [
        partial(_local, axes=axes, method=method, mask=own.mask, kernel=kernel, has_all_keys=has_all_keys, order=order)
        for own in masks
    ]

    def of_kind(query: Array, key: Array, value: Array, kind: Array | None, ids: list[Any]) -> Array:
        branches = [lambda *given, run=run, own=own: run(*given, *own) for run, own in zip(local, ids, strict=True)]
        return branches[0](query, key, value) if kind is None else jax.lax.switch(kind, branches, query, key, value)

    # Types of a Pallas kernel's results do not say over which mesh axes they vary, so the check is off for kernels.
    sharded = on_shards(
        of_kind,
        layout,
        in_specs=(queries, keys, keys, P(), [(tokens, P(tokens[0], None)) for _ in masks]),
        out_specs=queries,
        check_vma=kernel == "blockwise",
    )
    return sharded(query, key, value, kind, [(own.segments, own.key_ids) for own in masks])


def token_order(length: int, layout: ShardingContext, strategy: Strategy) -> np.ndarray | None:
    """Return the position of each stored token [length] for a zigzag ring; None if tokens are stored in order.

    Raises if the length cannot be divided into a zigzag.
    """
    return zigzag(length, layout.mesh.sp) if is_zigzag(layout.mesh, strategy) else None


def _local(
    query: Array,
    key: Array,
    value: Array,
    segments: Segments | None,
    key_ids: Array | None,
    *,
    axes: tuple[str, ...],
    method: SequenceMethod,
    mask: Mask,
    kernel: Kernel,
    has_all_keys: bool,
    order: np.ndarray | None,
) -> Array:
    if not axes:
        return full_sequence_attention(query, key, value, segments, mask, kernel=kernel)
    if has_all_keys:
        length = query.shape[1]
        here = sequential_segments(length, length * jax.lax.axis_index(axes))
        return chunked_attention(query, here, Keys(key, value, sequential_segments(key.shape[1])), mask, kernel=kernel)
    (axis,) = axes
    if method == "ulysses":
        return ulysses_attention(query, key, value, key_ids, axis, mask, kernel=kernel)
    if method == "gather":
        ids = None if segments is None else segments.ids
        return gathered_attention(query, key, value, ids, key_ids, axis, mask, kernel=kernel, order=order)
    length = query.shape[1]
    segments = segments or sequential_segments(length, length * jax.lax.axis_index(axis))
    return chunked_attention(query, segments, Keys(key, value, segments), mask, kernel=kernel, axis=axis)
