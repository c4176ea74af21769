"""Attention kernels, selected by strategy and device: for whole sequences, and for chunks of a sharded sequence.

On TPUs the strategy's `flash` is a Pallas kernel. For whole sequences it is splash attention, which ships with JAX and
skips masked blocks; for chunks in any order, and sequences too long for splash, it is `runtime.attention.flash`. On
other devices, and for lengths that are not a multiple of a TPU register's width, `flash` runs block by block in JAX
(`blockwise`). The strategy's `cudnn` is cuDNN's kernel for whole sequences on NVIDIA GPUs. Splash and cuDNN take no
positions: tokens must be in order. Splash takes document ids; cuDNN does not.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import Array

from meshwright.description.step.strategy import Attention
from meshwright.errors import MeshwrightError
from meshwright.execution.runtime.attention import flash
from meshwright.execution.runtime.attention.blockwise import ATTENTION_RESIDUALS, Keys
from meshwright.execution.runtime.attention.ring import ring_attention
from meshwright.execution.runtime.attention.segments import Mask, Segments
from meshwright.execution.runtime.mesh import mesh_platform
from meshwright.planning.cost.rates.attention import tpu_block, tpu_chunk_kernel, tpu_kernel

Kernel = Literal["blockwise", "flash", "splash", "cudnn"]


def select_kernel(attention: Attention, query: Array, length: int, segments: Segments | None, mask: Mask) -> Kernel:
    """Return the kernel for whole sequences of `length` tokens on the devices of the current mesh.

    Raises if `cudnn` is requested on devices other than NVIDIA GPUs, or for inputs it does not support.
    """
    if attention == "cudnn":
        platform = mesh_platform()
        reasons = {
            f"devices are of kind {platform}, not NVIDIA GPUs": platform != "gpu",
            f"queries are {query.dtype}, not in half precision": query.dtype not in (jnp.bfloat16, jnp.float16),
            "rows hold several documents": segments is not None and segments.ids is not None,
            f"a window of {mask.window} reaches to both sides": not mask.causal and mask.window is not None,
            f"queries attend to chunks of {mask.window} tokens": mask.is_chunked and mask.window is not None,
        }
        for reason, holds in reasons.items():
            if holds:
                raise MeshwrightError(f"attention='cudnn' does not run here: {reason}; use attention='flash'")
        return "cudnn"
    return tpu_kernel(length) if mesh_platform() == "tpu" else "blockwise"


def select_kernel_for_chunks(length: int) -> Kernel:
    """Return the kernel for chunks of `length` tokens on the devices of the current mesh."""
    return tpu_chunk_kernel(length) if mesh_platform() == "tpu" else "blockwise"


def full_sequence_attention(
    query: Array, key: Array, value: Array, segments: Segments | None, mask: Mask, *, kernel: Kernel
) -> Array:
    """Return attention of queries [b, s, k, g, h] over keys and values [b, s, k, h] of the same tokens, in order.

    The result has the query's shape and dtype, but the head dim of the values. segments: positions within documents,
    and document ids; None if each row is one document.
    """
    if kernel == "splash":
        return _splash(query, key, value, segments.ids if segments else None, mask)
    if kernel == "cudnn":
        b, s, k, g, h = query.shape
        # `jax.nn` takes values of the queries' head dim alone: narrower ones get zeros.
        value_dim = value.shape[3]
        mixed = jax.nn.dot_product_attention(
            query.reshape(b, s, k * g, h),
            key,
            jnp.pad(value, ((0, 0),) * 3 + ((0, h - value_dim),)),
            is_causal=mask.causal,
            local_window_size=None if mask.window is None else (mask.window - 1, 0),
            implementation="cudnn",
        )
        return mixed[..., :value_dim].reshape(b, s, k, g, value_dim)
    segments = segments or sequential_segments(query.shape[1])
    return chunked_attention(query, segments, Keys(key, value, segments), mask, kernel=kernel)


def chunked_attention(
    query: Array, segments: Segments, keys: Keys, mask: Mask, *, kernel: Kernel, axis: str | None = None
) -> Array:
    """Return attention of queries [b, s, k, g, h] over this device's keys and values [b, t, k, h].

    With `axis`, attend over the keys and values of all devices of this mesh axis, by a ring. Call it inside
    `jax.shard_map`. The result has the query's shape and dtype, but the head dim of the values.
    """
    if kernel != "flash":
        return ring_attention(query, segments, keys, axis, mask)
    heads_first = Keys(jnp.moveaxis(keys.key, 2, 1), jnp.moveaxis(keys.value, 2, 1), keys.segments)
    mixed: Any = ring_attention(_heads_first(query), segments, heads_first, axis, mask, flash)
    return jnp.moveaxis(mixed, 1, 2).reshape(*query.shape[:4], -1)


def sequential_segments(length: int, first: Array | int = 0) -> Segments:
    """Return segments of consecutive tokens from position `first`, the same in every row: [1, length]."""
    return Segments(first + jnp.arange(length, dtype=jnp.int32)[None])


def _splash(query: Array, key: Array, value: Array, segments: Array | None, mask: Mask) -> Array:
    """Return splash attention of queries [b, s, k, g, h]; segments: document ids [b, s], or None."""
    from jax.experimental.pallas.ops.tpu import splash_attention as splash  # Imported late: 0.3 s that only TPUs need.

    b, s, k, g, h = query.shape
    size = math.gcd(s, tpu_block(h))
    blocks = splash.BlockSizes(
        **{f"block_{name}": size for name in ("q", "kv", "q_dkv", "kv_dkv", "q_dq", "kv_dq")}  # type: ignore[arg-type]
    )
    masks = splash.MultiHeadMask([_splash_mask(s, mask)] * (k * g))
    attend = splash.make_splash_mha(
        masks, block_sizes=blocks, head_shards=1, q_seq_shards=1, residual_checkpoint_name=ATTENTION_RESIDUALS
    )
    arrays = (_heads_first(query), jnp.moveaxis(key, 1, 2), jnp.moveaxis(value, 1, 2))
    documents = None if segments is None else splash.SegmentIds(segments, segments)
    mixed: Any = jax.vmap(attend, in_axes=(0, 0, 0, None if documents is None else 0))(*arrays, documents)
    return jnp.moveaxis(mixed, 1, 2).reshape(b, s, k, g, -1)


def _heads_first(query: Array) -> Array:
    """Return queries [b, s, k, g, h] as [b, k * g, s, h], divided by sqrt(h): TPU kernels do not scale scores."""
    b, s, k, g, h = query.shape
    return jnp.moveaxis((query / math.sqrt(h)).astype(query.dtype).reshape(b, s, k * g, h), 1, 2)


def _splash_mask(length: int, mask: Mask) -> Any:
    from jax.experimental.pallas.ops.tpu import splash_attention as splash
    from jax.experimental.pallas.ops.tpu.splash_attention.splash_attention_mask import ChunkedCausalMask

    shape = (length, length)
    if mask.window is not None and mask.is_chunked:
        return ChunkedCausalMask(shape, mask.window)
    if mask.window is not None:
        return splash.LocalMask(shape, (mask.window - 1, 0 if mask.causal else mask.window - 1), offset=0)
    return splash.CausalMask(shape) if mask.causal else splash.FullMask(shape)
