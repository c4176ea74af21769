"""The forward pass of a Llama-style decoder, over its declared parameters and their logical axes.

Between blocks the residual stream is split along the sequence over tp too (Megatron's sequence parallelism,
arXiv:2205.05198): a block gathers it, multiplies by its shares of the weights, and reduce-scatters what it adds.
Letters of dims: b batch, s sequence, t sequence of keys, d embed, f mlp, k kv heads, g query heads a kv head, h head
dim, v vocab.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from meshwright.models.attention import INTERMEDIATE, attend, rotate
from meshwright.parallel import Layout
from meshwright.workload import ModelConfig, Remat

RESIDUAL = ("batch", "residual_sequence", "activation")
GATHERED = ("batch", "sequence", "activation")
HEADS = ("kv_heads", "group", "head_dim")
KV_HEADS = ("kv_heads", "head_dim")

PRODUCT = "product"
"""The name of the results of products, which the remat policies `matmuls` and `none` keep for backward."""

Weights = Mapping[str, Any]


class Cache(NamedTuple):
    """The keys and values of the tokens seen: [batch, length, kv_heads, head_dim] each, stacked over layers outside."""

    key: Array
    value: Array

    def extended(self, new: Cache, start: Array) -> Cache:
        """The cache with the keys and values of new tokens written from position `start`."""
        return Cache(
            *(jax.lax.dynamic_update_slice_in_dim(*pair, start, axis=1) for pair in zip(self, new, strict=True))
        )


def loss(params: Weights, batch: Weights, model: ModelConfig, layout: Layout, *, dtype: Any, remat: Remat) -> Array:
    """The mean loss in nats of `batch`: `tokens` and `targets`, [b, s] each."""
    x, table = embed(params, batch["tokens"], layout, dtype)
    x = layers(params["layers"], x, model, layout, remat)
    with jax.named_scope("loss"):
        return cross_entropy(logits(params, x, table, model, layout), batch["targets"])


def layers(weights: Weights, x: Array, model: ModelConfig, layout: Layout, remat: Remat) -> Array:
    """The residual stream [b, s, d] after all layers."""
    positions = jnp.arange(x.shape[1])

    def layer(x: Array, weights: Weights) -> tuple[Array, None]:
        return block(x, weights, positions, model, layout)[0], None

    return jax.lax.scan(_remat(layer, remat), x, weights)[0]


def embed(params: Weights, tokens: Array, layout: Layout, dtype: Any) -> tuple[Array, Array]:
    """The residual stream that `tokens` [b, s] start as, and the gathered table it was looked up in."""
    table = _weight(params["embedding"], layout, dtype, "vocab", "embed")
    axes = layout.axes("vocab")
    if not axes:
        return layout.place(table.at[tokens].get(out_sharding=layout.spec(*GATHERED)), *RESIDUAL), table

    def lookup(table: Array, tokens: Array) -> Array:
        """The rows that this device has; the others, zeros here, come with the sum."""
        local = tokens - jax.lax.axis_index(axes) * table.shape[0]
        here = (local >= 0) & (local < table.shape[0])
        rows = jnp.where(here[..., None], table[jnp.where(here, local, 0)], 0)
        if layout.axes("residual_sequence"):
            return jax.lax.psum_scatter(rows, axes, scatter_dimension=1, tiled=True)
        return jax.lax.psum(rows, axes)

    specs = (jax.typeof(table).sharding.spec, layout.spec("batch", "sequence"))
    return jax.shard_map(lookup, in_specs=specs, out_specs=layout.spec(*RESIDUAL))(table, tokens), table


def block(
    x: Array, weights: Weights, positions: Array, model: ModelConfig, layout: Layout, cache: Cache | None = None
) -> tuple[Array, Cache]:
    """One layer on the residual stream x [b, s, d]: what it becomes, and all keys and values attended to."""
    with jax.named_scope("attention"):
        h = _gathered(norm(x, weights["attention_norm"], model), layout, "kv_heads")
        added, seen = attention(h, weights, positions, model, layout, cache)
        x = x + checkpoint_name(layout.place(added, *RESIDUAL), PRODUCT)
    with jax.named_scope("mlp"):
        h = _gathered(norm(x, weights["mlp_norm"], model), layout, "mlp")
        return x + layout.place(mlp(h, weights, layout), *RESIDUAL), seen


def attention(
    h: Array, weights: Weights, positions: Array, model: ModelConfig, layout: Layout, cache: Cache | None
) -> tuple[Array, Cache]:
    """What attention adds to the stream, still to be summed over the axes that split heads; and the keys and values."""
    query, key, value = (
        checkpoint_name(jnp.einsum(product, h, _weight(weights[name], layout, h.dtype, "embed", *dims)), PRODUCT)
        for name, product, dims in (
            ("query", "bsd,dkgh->bskgh", HEADS),
            ("key", "bsd,dkh->bskh", KV_HEADS),
            ("value", "bsd,dkh->bskh", KV_HEADS),
        )
    )
    query, key = (checkpoint_name(rotate(array, positions, model), INTERMEDIATE) for array in (query, key))
    seen = Cache(key, value)
    if cache is not None:
        seen = cache.extended(seen, positions[0])
    # Every query sees the keys of the whole sequence, wherever it is split.
    whole = ("batch", "activation", "kv_heads", "head_dim")
    key, value = (
        checkpoint_name(layout.place(array, *whole, reduced=layout.axes("sequence")), INTERMEDIATE) for array in seen
    )
    mixed = checkpoint_name(attend(query, key, value, positions), INTERMEDIATE)
    output = _weight(weights["output"], layout, h.dtype, *HEADS, "embed")
    partial = layout.spec(*GATHERED, unreduced=layout.axes("kv_heads"))
    return jnp.einsum("bskgh,kghd->bsd", mixed, output, out_sharding=partial), seen


def mlp(h: Array, weights: Weights, layout: Layout) -> Array:
    """What the SwiGLU block adds to the stream, still to be summed over the axes that split mlp."""
    gate, up = (
        checkpoint_name(jnp.einsum("bsd,df->bsf", h, _weight(weights[name], layout, h.dtype, "embed", "mlp")), PRODUCT)
        for name in ("gate", "up")
    )
    down = _weight(weights["down"], layout, h.dtype, "mlp", "embed")
    partial = layout.spec(*GATHERED, unreduced=layout.axes("mlp"))
    return jnp.einsum("bsf,fd->bsd", jax.nn.silu(gate) * up, down, out_sharding=partial)


def norm(x: Array, scale: Array, model: ModelConfig) -> Array:
    """RMSNorm (arXiv:1910.07467) of x [b, s, d] in float32, in the dtype of x."""
    wide = x.astype(jnp.float32)
    normal = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + model.norm_epsilon)
    return (normal * scale).astype(x.dtype)


def logits(params: Weights, x: Array, table: Array, model: ModelConfig, layout: Layout) -> Array:
    """The float32 logits [b, s, v], vocab split, of the residual stream x; `table` is what `embed` looked up in."""
    h = _gathered(norm(x, params["final_norm"], model), layout, "vocab")
    if model.tied_embeddings:
        return jnp.einsum("bsd,vd->bsv", h, table, preferred_element_type=jnp.float32)
    table = _weight(params["unembedding"], layout, h.dtype, "embed", "vocab")
    return jnp.einsum("bsd,dv->bsv", h, table, preferred_element_type=jnp.float32)


def cross_entropy(scores: Array, targets: Array) -> Array:
    """The mean loss in nats of logits [b, s, v] for `targets` [b, s]; a split vocab is summed over, never gathered."""
    top = jax.lax.stop_gradient(jnp.max(scores, axis=-1, keepdims=True))
    total = jnp.sum(jnp.exp(scores - top), axis=-1)
    chosen = jnp.arange(scores.shape[-1]) == targets[..., None]
    picked = jnp.sum(jnp.where(chosen, scores - top, 0.0), axis=-1)
    return jnp.mean(jnp.log(total) - picked)


def _gathered(h: Array, layout: Layout, splits: str) -> Array:
    """The input of products that split the logical axis `splits`: whole along the sequence over the axes of that."""
    return checkpoint_name(layout.place(h, *GATHERED, reduced=layout.axes(splits)), INTERMEDIATE)


def _weight(stored: Array, layout: Layout, dtype: Any, *names: str) -> Array:
    """A parameter as products use it, narrowed before it is gathered."""
    return layout.weight(stored.astype(dtype), *names)


def _remat(layer: Callable[..., Any], remat: Remat) -> Callable[..., Any]:
    """The layer under a remat policy.

    What is kept is named, so that gathered weights never are: that would undo their sharding. Without a policy backward
    makes again what takes neither a product nor a collective, norms and activation functions.
    """
    kept = {"none": (PRODUCT, INTERMEDIATE), "matmuls": (PRODUCT,), "block": ()}[remat]
    return jax.checkpoint(layer, policy=jax.checkpoint_policies.save_only_these_names(*kept))
