"""A tiny transformer of somebody else in plain JAX, whose layers are scanned or written one by one."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax


class Sizes(NamedTuple):
    """Of a model and its batch."""

    batch: int = 16
    length: int = 24
    vocab: int = 96
    embed: int = 32
    heads: int = 4
    head_dim: int = 8
    mlp: int = 64
    layers: int = 2


TINY = Sizes()
OPTIMIZER = optax.adam(1e-3)


def weights(key, sizes=TINY, count=()):
    """The parameters of one layer, or of `count` stacked ones."""
    heads = (sizes.heads, sizes.head_dim)
    shapes = {
        **dict.fromkeys("qkv", (sizes.embed, *heads)),
        "o": (*heads, sizes.embed),
        "up": (sizes.embed, sizes.mlp),
        "down": (sizes.mlp, sizes.embed),
    }
    keys = dict(zip(shapes, jax.random.split(key, len(shapes)), strict=True))
    return {name: 0.1 * jax.random.normal(keys[name], (*count, *shape)) for name, shape in shapes.items()}


def layer(stream, layer_weights):
    """Causal attention and an MLP on the residual stream."""
    normed = stream * jax.lax.rsqrt((stream**2).mean(-1, keepdims=True) + 1e-6)
    query, key, value = (jnp.einsum("btd,dhk->bthk", normed, layer_weights[name]) for name in "qkv")
    scores = jnp.einsum("bqhk,bshk->bhqs", query, key) / query.shape[-1] ** 0.5
    mask = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    chances = jax.nn.softmax(jnp.where(mask, scores, -1e9))
    attended = jnp.einsum("bhqs,bshk->bqhk", chances, value)
    stream = stream + jnp.einsum("bqhk,hkd->bqd", attended, layer_weights["o"])
    return stream + jax.nn.gelu(stream @ layer_weights["up"]) @ layer_weights["down"]


@partial(jax.jit, static_argnames=("sizes", "scanned"))
def make_state(key, sizes=TINY, *, scanned=True):
    """The parameters and moments of a transformer."""
    first, second, third = jax.random.split(key, 3)
    keys = jax.random.split(third, sizes.layers)
    stacked = weights(third, sizes, (sizes.layers,)) if scanned else [weights(one, sizes) for one in keys]
    params = {
        "embed": 0.1 * jax.random.normal(first, (sizes.vocab, sizes.embed)),
        "out": 0.1 * jax.random.normal(second, (sizes.embed, sizes.vocab)),
        "layers": stacked,
    }
    return params, OPTIMIZER.init(params)


def loss(params, tokens):
    """The mean cross-entropy of the next tokens."""
    stream = params["embed"][tokens[:, :-1]]
    if isinstance(params["layers"], dict):
        body = jax.checkpoint(lambda stream, one: (layer(stream, one), None))
        stream, _ = jax.lax.scan(body, stream, params["layers"])
    else:
        for one in params["layers"]:
            stream = jax.checkpoint(layer)(stream, one)
    logits = jnp.einsum("btd,dv->btv", stream, params["out"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


def train_step(state, tokens):
    """One step of Adam."""
    params, moments = state
    found, gradients = jax.value_and_grad(loss)(params, tokens)
    updates, moments = OPTIMIZER.update(gradients, moments)
    return (optax.apply_updates(params, updates), moments), found


def tokens(key=1):
    return jax.random.randint(jax.random.key(key), (TINY.batch, TINY.length + 1), 0, TINY.vocab)
