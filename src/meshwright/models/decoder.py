"""The forward pass of a Llama-style decoder, over its declared parameters and their logical axes.

Letters of dims: b batch, s sequence, t sequence of keys, d embed, f mlp, k kv heads, g query heads a kv head, h head
dim, v vocab.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

from meshwright.errors import MeshwrightError
from meshwright.models.attention import INTERMEDIATE, PRODUCT, SCORES, Turns, attend, rotate, turns
from meshwright.models.dropout import ATTENTION, MLP, Draws, dropped
from meshwright.models.experts import load_of_layers, mix
from meshwright.models.norm import norm
from meshwright.models.product import product
from meshwright.models.stream import GATHERED, RESIDUAL, gathered, off_stream, onto_stream
from meshwright.runtime import Layout, sequence
from meshwright.runtime.blockwise import ATTENDED
from meshwright.runtime.experts_routing import Load
from meshwright.runtime.overlapped import BROUGHT
from meshwright.runtime.places import Mask, Places
from meshwright.workload import DEFAULT, ModelConfig, Remat, Strategy

STREAM = "stream"
"""The name of a layer's input, which the remat policy `offload` keeps in host memory."""

KEPT: Mapping[Remat, tuple[str, ...]] = {
    "none": (PRODUCT, INTERMEDIATE, BROUGHT, ATTENDED, SCORES),
    "attention": (PRODUCT, INTERMEDIATE, BROUGHT, ATTENDED),
    "matmuls": (PRODUCT,),
    "block": (),
}
"""The names that a remat policy keeps for backward in the device's memory."""

STACKS = ("dense_layers", "layers")
"""The layers of a model in their order, by the names that their weights are stacked under; most have no first ones."""

Weights = Mapping[str, Any]


class Placed(NamedTuple):
    """Where tokens stand, [s] where they lie in order, and the turns of heads there: the same in every layer."""

    places: Array | Places
    turns: Turns


class Cache(NamedTuple):
    """The keys and values of the tokens seen: [batch, length, kv_heads, head_dim] each, stacked over layers outside."""

    key: Array
    value: Array

    def extended(self, new: Cache, start: Array) -> Cache:
        """The cache with the keys and values of new tokens written from position `start`."""
        return Cache(
            *(jax.lax.dynamic_update_slice_in_dim(*pair, start, axis=1) for pair in zip(self, new, strict=True))
        )


def loss_and_load(
    params: Weights,
    batch: Weights,
    model: ModelConfig,
    layout: Layout,
    *,
    dtype: Any,
    remat: Remat,
    strategy: Strategy = DEFAULT,
    draws: Draws | None = None,
) -> tuple[Array, Load | None]:
    """The mean loss in nats of `batch`: `tokens` and `targets`, [b, s] each; and the load of each layer's experts.

    `positions` [b, s] beside them say where tokens stand that do not lie in order, or not in one document a row;
    `segments` [b, s] then tell documents apart. Both want a fused attention, which knows places. Of a model of experts
    its loss of imbalance is a part. draws say what is dropped.
    """
    x, table = embed(params, batch["tokens"], layout, dtype)
    where, load = places_of(batch, model), None
    for number, stack in enumerate(STACKS):
        if stack in params:
            own = draws and draws.of(number)
            x, load = layers(params[stack], x, where, model, layout, remat, strategy, own)
    with jax.named_scope("loss"):
        value = cross_entropy(logits(params, x, table, model, layout), batch["targets"])
        if model.experts is None or load is None:
            return value, None
        return value + model.experts.balance_weight * load.balance_loss, load


def places_of(batch: Weights, model: ModelConfig) -> Placed:
    """Where the tokens of a batch stand; heads turn where these are, so turns are split as the tokens are."""
    if "positions" in batch:
        return placed(Places(batch["positions"], batch.get("segments")), model)
    tokens = jax.typeof(batch["tokens"])
    whole = jnp.arange(tokens.shape[1])
    return Placed(whole, turns(jax.reshard(whole, P(tokens.sharding.spec[1])), model))


def placed(places: Array | Places, model: ModelConfig) -> Placed:
    """Places as layers take them, with the turns there worked out: sines made once, which cost more than their use."""
    return Placed(places, turns(places.positions if isinstance(places, Places) else places, model))


def layers(
    weights: Weights,
    x: Array,
    where: Placed,
    model: ModelConfig,
    layout: Layout,
    remat: Remat,
    strategy: Strategy,
    draws: Draws | None = None,
) -> tuple[Array, Load | None]:
    """The residual stream [b, s, d] after the layers of a stack, and the load of their experts, if they have some."""

    def layer(x: Array, own: tuple[Weights, Array | None]) -> tuple[Array, Array | None]:
        weights, number = own
        here = None if draws is None or number is None else draws.of(number)
        x, _ = attended(checkpoint_name(x, STREAM), weights, where, model, layout, strategy=strategy, draws=here)
        return fed_forward(x, weights, model, layout, strategy, here)

    numbers = draws and jnp.arange(jax.tree.leaves(weights)[0].shape[0])
    x, loads = jax.lax.scan(rematerialized(layer, remat), x, (weights, numbers))
    return x, None if loads is None else load_of_layers(loads)


def embed(params: Weights, tokens: Array, layout: Layout, dtype: Any) -> tuple[Array, Array]:
    """The residual stream that `tokens` [b, s] start as, and the gathered table it was looked up in.

    Each device looks up what rows it has: over axes that split these, it has the tokens of all.
    """
    table = table_in_use(params, layout, dtype)
    axes = layout.axes("vocab")
    dims = {
        dim: tuple(axis for axis in axes if axis in layout.axes(name))
        for dim, name in ((1, "residual_sequence"), (0, "batch"))
    }
    copied = tuple(axis for axis in axes if not any(axis in split for split in dims.values()))
    if not axes:
        return layout.place(table.at[tokens].get(out_sharding=layout.spec(*GATHERED)), *RESIDUAL), table

    def lookup(table: Array, tokens: Array) -> Array:
        """The rows that this device has; the others, zeros here, come with the sum."""
        local = tokens - jax.lax.axis_index(axes) * table.shape[0]
        here = (local >= 0) & (local < table.shape[0])
        rows = jnp.where(here[..., None], table[jnp.where(here, local, 0)], 0)
        for dim, split in dims.items():
            rows = jax.lax.psum_scatter(rows, split, scatter_dimension=dim, tiled=True) if split else rows
        return jax.lax.psum(rows, copied) if copied else rows

    specs = (jax.typeof(table).sharding.spec, jax.typeof(tokens).sharding.spec)
    return jax.shard_map(lookup, in_specs=specs, out_specs=layout.spec(*RESIDUAL))(table, tokens), table


def table_in_use(params: Weights, layout: Layout, dtype: Any) -> Array:
    """The embedding table as lookups and tied logits use it."""
    return _weight(params["embedding"], layout, dtype, "vocab", "embed")


def block(
    x: Array,
    weights: Weights,
    where: Placed,
    model: ModelConfig,
    layout: Layout,
    cache: Cache | None = None,
    *,
    strategy: Strategy = DEFAULT,
) -> tuple[Array, Cache]:
    """One layer on the residual stream x [b, s, d]: what it becomes, and all keys and values attended to.

    where: the places of its tokens, which with a cache lie in order.
    """
    x, seen = attended(x, weights, where, model, layout, cache, strategy=strategy)
    return fed_forward(x, weights, model, layout, strategy)[0], seen


def attended(
    x: Array,
    weights: Weights,
    where: Placed,
    model: ModelConfig,
    layout: Layout,
    cache: Cache | None = None,
    *,
    strategy: Strategy,
    draws: Draws | None = None,
) -> tuple[Array, Cache]:
    """The residual stream x [b, s, d] after a layer's attention, and all keys and values attended to."""
    with jax.named_scope("attention"):
        h = norm(x, weights["attention_norm"], model.norm_epsilon)
        added, seen = attention(h, weights, where, model, layout, cache, strategy, draws)
        return x + dropped(checkpoint_name(added, PRODUCT), draws, layout, ATTENTION), seen


def fed_forward(
    x: Array, weights: Weights, model: ModelConfig, layout: Layout, strategy: Strategy, draws: Draws | None = None
) -> tuple[Array, Array | None]:
    """The residual stream x [b, s, d] after a layer's mlp or experts, and the load of these, as `mix` has it."""
    with jax.named_scope("mlp"):
        h = norm(x, weights["mlp_norm"], model.norm_epsilon)
        if model.experts is None or "router" not in weights:
            return x + dropped(mlp(h, weights, layout, strategy), draws, layout, MLP), None
        added, load = mix(h, weights, model.experts, layout, strategy.matmul_dtype)
        if model.experts.shared_mlp:
            added = added + mlp(h, weights, layout, strategy, prefix="shared_")
        return x + dropped(added, draws, layout, MLP), load


def attention(
    h: Array,
    weights: Weights,
    where: Placed,
    model: ModelConfig,
    layout: Layout,
    cache: Cache | None,
    strategy: Strategy,
    draws: Draws | None = None,
) -> tuple[Array, Cache]:
    """What attention adds to the stream, of which h is normed, as it lies between blocks; and the keys and values."""
    # Heads are one dim to products: with several to sum over, backward, XLA:CPU copies the weights first.
    stored = [weights[name] for name in ("query", "key", "value")]
    used = [_weight(_matrix(array, 1), layout, h.dtype, "embed", "kv_heads") for array in stored]
    made = off_stream(("bsd,dn->bsn",) * 3, h, used, (("kv_heads",),) * 3, layout, strategy)
    query, key, value = (
        checkpoint_name(array, PRODUCT).reshape(*h.shape[:2], *like.shape[1:])
        for array, like in zip(made, stored, strict=True)
    )
    query, key = (checkpoint_name(rotate(array, where.turns), INTERMEDIATE) for array in (query, key))
    places = where.places
    seen = Cache(key, value)
    if cache is not None:
        seen = cache.extended(seen, places[0])
    if cache is None and strategy.attention != "scores":
        known = places if isinstance(places, Places) else None
        mixed = sequence.attend(
            query, key, value, known, layout, method=strategy.sequence, mask=Mask(), attention=strategy.attention
        )
        mixed = checkpoint_name(mixed, INTERMEDIATE)
    else:
        mixed = with_scores(query, seen, places, layout, draws)
    output = _weight(_turned(_matrix(weights["output"], 3)), layout, h.dtype, "embed", "kv_heads")
    return onto_stream("bsn,dn->bsd", mixed.reshape(*h.shape[:2], -1), output, ("kv_heads",), layout, strategy), seen


def with_scores(
    query: Array, seen: Cache, positions: Array | Places, layout: Layout, draws: Draws | None = None
) -> Array:
    """What attention mixes by scores that go through memory; every query has the keys of the whole sequence there."""
    if isinstance(positions, Places):
        raise MeshwrightError("a batch with positions wants attention='flash'; 'scores' takes tokens in order")
    whole = ("batch", "activation", "kv_heads", "head_dim")
    key, value = (
        checkpoint_name(layout.place(array, *whole, reduced=layout.axes("sequence")), INTERMEDIATE) for array in seen
    )
    return attend(query, key, value, positions, draws)


def mlp(h: Array, weights: Weights, layout: Layout, strategy: Strategy, *, prefix: str = "") -> Array:
    """What the SwiGLU block adds to the stream, of which h is normed, as it lies between blocks."""
    used = [_weight(weights[f"{prefix}{name}"], layout, h.dtype, "embed", "mlp") for name in ("gate", "up")]
    made = off_stream(("bsd,df->bsf",) * 2, h, used, (("mlp",),) * 2, layout, strategy)
    gate, up = (checkpoint_name(array, PRODUCT) for array in made)
    down = _weight(_turned(weights[f"{prefix}down"]), layout, h.dtype, "embed", "mlp")
    return onto_stream("bsf,df->bsd", jax.nn.silu(gate) * up, down, ("mlp",), layout, strategy)


def logits(params: Weights, x: Array, table: Array, model: ModelConfig, layout: Layout) -> Array:
    """The float32 logits [b, s, v], vocab split, of the residual stream x; `table` is what `embed` looked up in."""
    h = gathered(norm(x, params["final_norm"], model.norm_epsilon), layout, "vocab")
    if model.tied_embeddings:
        return product("bsd,vd->bsv", h, table, dtype=jnp.float32)
    table = _weight(params["unembedding"], layout, h.dtype, "embed", "vocab")
    return product("bsd,dv->bsv", h, table, dtype=jnp.float32)


def cross_entropy(scores: Array, targets: Array) -> Array:
    """The mean loss in nats of logits [b, s, v] for `targets` [b, s]; a split vocab is summed over, never gathered."""
    top = jax.lax.stop_gradient(jnp.max(scores, axis=-1, keepdims=True))
    total = jnp.sum(jnp.exp(scores - top), axis=-1)
    chosen = jnp.arange(scores.shape[-1]) == targets[..., None]
    picked = jnp.sum(jnp.where(chosen, scores - top, 0.0), axis=-1)
    return jnp.mean(jnp.log(total) - picked)


def _matrix(stored: Array, num_rows: int) -> Array:
    """A parameter with its first dims as one and its others as one, the first of each split as they are."""
    spec, shape = jax.typeof(stored).sharding.spec, stored.shape
    split = P(spec.partitions[0], spec.partitions[num_rows], reduced=spec.reduced)
    # Asked for no sharding, JAX 0.10.2 reshapes nothing that is typed reduced.
    return jax.lax.reshape(stored, (math.prod(shape[:num_rows]), math.prod(shape[num_rows:])), out_sharding=split)


def _turned(stored: Array) -> Array:
    """A matrix with its last dim first, along which it is stored in shards: so gathered, they lie one after another.

    Gathered along its last dim they have to be interleaved, which takes XLA:CPU another copy of the whole.
    """
    return stored.T


def _weight(stored: Array, layout: Layout, dtype: Any, *names: str) -> Array:
    """A parameter as products use it, narrowed before it is gathered."""
    return layout.weight(stored, *names, dtype=dtype)


def rematerialized(layer: Callable[..., Any], remat: Remat) -> Callable[..., Any]:
    """The layer under a remat policy.

    What is kept is named, so that gathered weights never are: that would undo their sharding. Without a policy backward
    makes again what takes neither a product nor a collective, norms and activation functions.
    """
    policies = jax.checkpoint_policies
    if remat == "offload":
        policy = policies.save_and_offload_only_these_names(
            names_which_can_be_saved=[],
            names_which_can_be_offloaded=[STREAM],
            offload_src="device",
            offload_dst="pinned_host",
        )
    else:
        policy = policies.save_only_these_names(*KEPT[remat])
    return jax.checkpoint(layer, policy=policy)
