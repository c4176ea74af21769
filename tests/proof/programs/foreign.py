"""A tiny transformer of somebody else in plain JAX, whose layers are scanned or written one by one."""

import jax
import jax.numpy as jnp
import optax

BATCH, LENGTH, VOCAB, EMBED, HEADS, HEAD_DIM, MLP, LAYERS = 16, 24, 96, 32, 4, 8, 64, 2
OPTIMIZER = optax.adam(1e-3)


def weights(key, count=()):
    """The parameters of one layer, or of `count` stacked ones."""
    shapes = {
        "q": (EMBED, HEADS, HEAD_DIM),
        "k": (EMBED, HEADS, HEAD_DIM),
        "v": (EMBED, HEADS, HEAD_DIM),
        "o": (HEADS, HEAD_DIM, EMBED),
        "up": (EMBED, MLP),
        "down": (MLP, EMBED),
    }
    keys = dict(zip(shapes, jax.random.split(key, len(shapes)), strict=True))
    return {name: 0.1 * jax.random.normal(keys[name], (*count, *shape)) for name, shape in shapes.items()}


def layer(stream, layer_weights):
    """Causal attention and an MLP on the residual stream."""
    normed = stream * jax.lax.rsqrt((stream**2).mean(-1, keepdims=True) + 1e-6)
    query, key, value = (jnp.einsum("btd,dhk->bthk", normed, layer_weights[name]) for name in "qkv")
    scores = jnp.einsum("bqhk,bshk->bhqs", query, key) / HEAD_DIM**0.5
    mask = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    chances = jax.nn.softmax(jnp.where(mask, scores, -1e9))
    attended = jnp.einsum("bhqs,bshk->bqhk", chances, value)
    stream = stream + jnp.einsum("bqhk,hkd->bqd", attended, layer_weights["o"])
    return stream + jax.nn.gelu(stream @ layer_weights["up"]) @ layer_weights["down"]


def make_state(key, *, scanned=True):
    """The parameters and moments of a transformer."""
    first, second, third = jax.random.split(key, 3)
    stacked = weights(third, (LAYERS,)) if scanned else [weights(one) for one in jax.random.split(third, LAYERS)]
    params = {
        "embed": 0.1 * jax.random.normal(first, (VOCAB, EMBED)),
        "out": 0.1 * jax.random.normal(second, (EMBED, VOCAB)),
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
    return jax.random.randint(jax.random.key(key), (BATCH, LENGTH + 1), 0, VOCAB)
