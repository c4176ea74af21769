"""Latent attention over a cache of latents, with the weights of keys and values absorbed (arXiv:2405.04434).

A score is query . (W_key latent) = (W_key^T query) . latent: queries are projected into latent space, and the averaged
latents out of it, so keys and values are never computed (section 2.1.2).
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import jax
import jax.numpy as jnp
from jax import Array

from meshwright.description.step.layer import Attention, Block, Concat, LatentKeys, Linear
from meshwright.execution.models.attention_layer import scoring_of
from meshwright.execution.models.context import LayerContext
from meshwright.execution.models.generation.cache import Cache
from meshwright.execution.models.generation.cached_attention import write_and_attend
from meshwright.execution.models.generation.paged_cache import PagedCache


def latent_attention(
    query: Array, new: Cache, key_weight: Array, value_weight: Array, op: Attention, context: LayerContext
) -> tuple[Array, Cache | PagedCache]:
    """Return the attention output [b, s, heads, 1, value_dim] of queries [b, s, heads, qk_dim], and the updated cache.

    Args:
        new: latents and rotary keys of the queries' tokens, see `Cache`; they are written to the cache first.
        key_weight, value_weight: the weights [rank, heads, head_dim] that would compute keys and values from latents.
    """
    layout = context.layout
    assert isinstance(context.cache, Cache | PagedCache)
    of_key, of_value = (
        jax.reshard(weight.astype(query.dtype), layout.spec("latent_input", "kv_heads", "head_dim"))
        for weight in (key_weight, value_weight)
    )
    plain = of_key.shape[-1]
    absorbed = jnp.einsum("bsnh,rnh->bsnr", query[..., :plain], of_key)
    wide = jnp.concatenate([absorbed, query[..., plain:]], axis=-1)[:, :, None]
    (window,) = op.windows
    mixed, cache = write_and_attend(
        *(wide, new, context.cache, context.cache_layer, context.positions.numbers, layout, scoring_of(op), window),
        is_latent=True,
    )
    return jnp.einsum("bsnr,rnh->bsnh", mixed[:, :, 0], of_value)[:, :, :, None], cache


@lru_cache(maxsize=256)
def with_absorbed_latents(block: Block) -> Block:
    """Return a block as decoding runs it, without the matmuls and concatenations that compute keys and values.

    A block without latent attention is returned unchanged.
    """
    latent = latent_of(block)
    if latent is None:
        return block
    absorbed = (latent.key_weight, latent.value_weight)
    ops = (op for op in block.ops if not isinstance(op, Concat))
    return replace(block, ops=tuple(op for op in ops if not (isinstance(op, Linear) and op.name in absorbed)))


def latent_of(block: Block) -> LatentKeys | None:
    """Return the latent of a block's attention; None if it has none."""
    return next((op.latent for op in block.ops if isinstance(op, Attention)), None)
