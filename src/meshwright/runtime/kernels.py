"""Attention by the kernel that a strategy names and the device has, of whole sequences and of parts of them.

`flash` is a Pallas kernel on TPUs: of whole sequences splash attention, which comes with JAX and skips the blocks
behind the mask, of parts in any order, and of sequences too long for that, those of `flash`. Elsewhere, and
where tokens do not fill the width of a TPU's registers, it goes block by block in JAX. `cudnn` is cuDNN's, of whole
sequences on NVIDIA GPUs. Splash and cuDNN know nothing of places: they take tokens in their order, and documents by
segment ids.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental.pallas.ops.tpu import splash_attention as splash

from meshwright.cost.attention import LANES, tpu_block, tpu_kernel
from meshwright.errors import MeshwrightError
from meshwright.runtime import flash
from meshwright.runtime.blockwise import ATTENDED, Keys
from meshwright.runtime.places import Mask, Places
from meshwright.runtime.ring_attention import ring_attention
from meshwright.workload import Attention

Kernel = Literal["blockwise", "flash", "splash", "cudnn"]


def kernel_of(attention: Attention, query: Array, length: int, places: Places | None, mask: Mask) -> Kernel:
    """The kernel of whole sequences of `length` tokens on the devices of the mesh in context.

    Raises where `cudnn` is asked of another device than an NVIDIA GPU, or of what it does not take.
    """
    if attention == "cudnn":
        _check_cudnn(_platform(), query, places, mask)
        return "cudnn"
    return tpu_kernel(length) if _platform() == "tpu" else "blockwise"


def kernel_of_parts(length: int) -> Kernel:
    """The kernel of parts of sequences, of `length` tokens each, on the devices of the mesh in context."""
    return "flash" if _platform() == "tpu" and length % LANES == 0 else "blockwise"


def _platform() -> str:
    """What the devices of the mesh in context are."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return device.platform if device is not None else jax.default_backend()


def _check_cudnn(platform: str, query: Array, places: Places | None, mask: Mask) -> None:
    """Raise where cuDNN's attention does not run."""
    reasons = {
        f"devices are of kind {platform}, not NVIDIA GPUs": platform not in ("gpu", "cuda"),
        f"queries are {query.dtype}, not in half precision": query.dtype not in (jnp.bfloat16, jnp.float16),
        "rows hold several documents": places is not None and places.segments is not None,
        f"a window of {mask.window} reaches to both sides": not mask.causal and mask.window is not None,
    }
    for reason, holds in reasons.items():
        if holds:
            raise MeshwrightError(f"attention='cudnn' does not run here: {reason}; use attention='flash'")


def whole_attention(
    query: Array, key: Array, value: Array, places: Places | None, mask: Mask, *, kernel: Kernel
) -> Array:
    """Attention of queries [b, s, k, g, h] over keys and values [b, s, k, h] of the same tokens, in their order.

    places: None where each row is one document from its first token; else `positions` count from the start of each of
    `segments`. Returns an array of the query's shape and dtype.
    """
    if kernel == "splash":
        return _splash(query, key, value, places.segments if places else None, mask)
    if kernel == "cudnn":
        return _cudnn(query, key, value, mask)
    places = places or in_order(query.shape[1])
    return parts_attention(query, places, Keys(key, value, places), mask, kernel=kernel)


def parts_attention(
    query: Array, places: Places, keys: Keys, mask: Mask, *, kernel: Kernel, axis: str | None = None
) -> Array:
    """Attention of queries [b, s, k, g, h] at `places` over keys and values [b, t, k, h], here or of a whole axis.

    To be called inside `jax.shard_map`. Returns an array of the query's shape and dtype.
    """
    if kernel != "flash":
        return ring_attention(query, places, keys, axis, mask)
    heads_first = Keys(jnp.moveaxis(keys.key, 2, 1), jnp.moveaxis(keys.value, 2, 1), keys.places)
    mixed: Any = ring_attention(_heads_first(query), places, heads_first, axis, mask, flash)
    return jnp.moveaxis(mixed, 1, 2).reshape(*query.shape[:4], -1)


def in_order(length: int, first: Array | int = 0) -> Places:
    """The places of tokens that follow one another from position `first`, the same in every row: [1, length]."""
    return Places(first + jnp.arange(length, dtype=jnp.int32)[None])


def _splash(query: Array, key: Array, value: Array, segments: Array | None, mask: Mask) -> Array:
    """Splash attention, which has heads before tokens."""
    b, s, k, g, h = query.shape
    size = math.gcd(s, tpu_block(h))
    blocks = splash.BlockSizes(
        **{f"block_{name}": size for name in ("q", "kv", "q_dkv", "kv_dkv", "q_dq", "kv_dq")}  # type: ignore[arg-type]
    )
    masks = splash.MultiHeadMask([_splash_mask(s, mask)] * (k * g))
    attend = splash.make_splash_mha(
        masks, block_sizes=blocks, head_shards=1, q_seq_shards=1, residual_checkpoint_name=ATTENDED
    )
    arrays = (_heads_first(query), jnp.moveaxis(key, 1, 2), jnp.moveaxis(value, 1, 2))
    documents = None if segments is None else splash.SegmentIds(segments, segments)
    mixed: Any = jax.vmap(attend, in_axes=(0, 0, 0, None if documents is None else 0))(*arrays, documents)
    return jnp.moveaxis(mixed, 1, 2).reshape(b, s, k, g, h)


def _heads_first(query: Array) -> Array:
    """Queries [b, s, k, g, h] as [b, k g, s, h], scaled: no kernel of TPUs has a scale of its own."""
    b, s, k, g, h = query.shape
    return jnp.moveaxis((query / math.sqrt(h)).astype(query.dtype).reshape(b, s, k * g, h), 1, 2)


def _splash_mask(length: int, mask: Mask) -> splash.Mask:
    """The mask in splash attention's terms, computed inside the kernel."""
    shape = (length, length)
    if mask.window is not None:
        return splash.LocalMask(shape, (mask.window - 1, 0 if mask.causal else mask.window - 1), offset=0)
    return splash.CausalMask(shape) if mask.causal else splash.FullMask(shape)


def _cudnn(query: Array, key: Array, value: Array, mask: Mask) -> Array:
    """cuDNN's attention, which has query heads of one kv head beside each other too."""
    b, s, k, g, h = query.shape
    mixed = jax.nn.dot_product_attention(
        query.reshape(b, s, k * g, h),
        key,
        value,
        is_causal=mask.causal,
        local_window_size=None if mask.window is None else (mask.window - 1, 0),
        implementation="cudnn",
    )
    return mixed.reshape(b, s, k, g, h)
