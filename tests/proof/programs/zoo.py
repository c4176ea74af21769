"""Train steps of other people's models, in plain JAX and Flax, each with abstract arguments: `PROGRAMS[name]()`.

`width` scales the dims that matter for speed; the default is small enough to run on simulated devices.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from flax import nnx

Built = tuple[Callable[..., Any], tuple[Any, ...]]
OPTIMIZER = optax.adam(1e-3)


def abstract(function, *args):
    return jax.eval_shape(function, *args)


def cross_entropy(logits, labels):
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def trained(loss, params, *batch) -> Built:
    """A donated step of Adam on a loss of parameters and a batch."""

    def step(state, *batch):
        params, moments = state
        value, gradients = jax.value_and_grad(loss)(params, *batch)
        updates, moments = OPTIMIZER.update(gradients, moments)
        return (optax.apply_updates(params, updates), moments), value

    step.__name__ = loss.__name__
    return jax.jit(step, donate_argnums=0), ((params, abstract(OPTIMIZER.init, params)), *batch)


def ints(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def floats(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


class Block(nn.Module):
    heads: int

    @nn.compact
    def __call__(self, x, _=None):
        mask = nn.make_causal_mask(x[..., 0])
        normed = nn.LayerNorm()(x)
        x = x + nn.MultiHeadDotProductAttention(self.heads)(normed, normed, mask=mask)
        hidden = nn.gelu(nn.Dense(4 * x.shape[-1])(nn.LayerNorm()(x)))
        return x + nn.Dense(x.shape[-1])(hidden), None


class Transformer(nn.Module):
    vocab: int
    width: int
    heads: int
    layers: int

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(self.vocab, self.width)(tokens)
        x = x + self.param("positions", nn.initializers.normal(), (tokens.shape[1], self.width))
        block = nn.scan(nn.remat(Block), variable_axes={"params": 0}, split_rngs={"params": True}, length=self.layers)
        x, _ = block(self.heads)(x, None)
        return nn.Dense(self.vocab, use_bias=False)(nn.LayerNorm()(x))


def linen_transformer(width=32, batch=16, length=24, layers=2) -> Built:
    """A decoder in Flax Linen, its layers scanned and recomputed."""
    model = Transformer(vocab=3 * width, width=width, heads=8, layers=layers)

    def linen_loss(params, tokens):
        return cross_entropy(model.apply(params, tokens[:, :-1]), tokens[:, 1:])

    params = abstract(model.init, jax.random.key(0), ints(batch, length))
    return trained(linen_loss, params, ints(batch, length + 1))


class NnxBlock(nnx.Module):
    def __init__(self, width, rngs):
        self.norm = nnx.RMSNorm(width, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(8, width, rngs=rngs, decode=False)
        self.up = nnx.Linear(width, 4 * width, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, rngs=rngs)

    def __call__(self, x):
        x = x + self.attention(self.norm(x))
        return x + self.down(nnx.relu(self.up(x)))


class NnxModel(nnx.Module):
    def __init__(self, vocab, width, layers, rngs):
        self.embed = nnx.Embed(vocab, width, rngs=rngs)
        self.blocks = nnx.List([NnxBlock(width, rngs) for _ in range(layers)])
        self.head = nnx.Linear(width, vocab, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def nnx_transformer(width=32, batch=16, length=24, layers=2) -> Built:
    """An encoder in Flax NNX, layers one by one."""
    model = nnx.eval_shape(lambda: NnxModel(3 * width, width, layers, nnx.Rngs(0)))
    graph, params = nnx.split(model)

    def nnx_loss(params, tokens, labels):
        return cross_entropy(nnx.merge(graph, params)(tokens), labels)

    return trained(nnx_loss, nnx.to_pure_dict(params), ints(batch, length), ints(batch, length))


def gpt2(width=32, batch=16, length=24, layers=2, heads=4) -> Built:
    """GPT-2 as in public repositories: one matrix for queries, keys and values, tied embeddings, dropout left out."""
    shapes = {
        "c_attn": (width, 3 * width), "b_attn": (3 * width,), "c_proj": (width, width), "b_proj": (width,),
        "c_fc": (width, 4 * width), "b_fc": (4 * width,), "m_proj": (4 * width, width), "b_m": (width,),
        "ln_1": (width,), "ln_2": (width,),
    }  # fmt: skip
    layer = {name: floats(*shape) for name, shape in shapes.items()}
    params = {
        "wte": floats(3 * width, width),
        "wpe": floats(length, width),
        "h": [layer] * layers,
        "ln_f": floats(width),
    }

    def norm(x, scale):
        x = x - x.mean(-1, keepdims=True)
        return x * jax.lax.rsqrt((x**2).mean(-1, keepdims=True) + 1e-5) * scale

    def attention(x, one):
        query, key, value = jnp.split(x @ one["c_attn"] + one["b_attn"], 3, axis=-1)
        query, key, value = (each.reshape(*each.shape[:2], heads, -1) for each in (query, key, value))
        scores = jnp.einsum("bqhd,bkhd->bhqk", query, key) / query.shape[-1] ** 0.5
        scores = jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], bool)), scores, -1e9)
        found = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), value)
        return found.reshape(x.shape) @ one["c_proj"] + one["b_proj"]

    def gpt2_loss(params, tokens):
        x = params["wte"][tokens[:, :-1]] + params["wpe"]
        for one in params["h"]:
            x = x + attention(norm(x, one["ln_1"]), one)
            x = x + jax.nn.gelu(norm(x, one["ln_2"]) @ one["c_fc"] + one["b_fc"]) @ one["m_proj"] + one["b_m"]
        return cross_entropy(norm(x, params["ln_f"]) @ params["wte"].T, tokens[:, 1:])

    return trained(gpt2_loss, params, ints(batch, length + 1))


def two_towers(width=32, batch=64, users=512, items=1024) -> Built:
    """Two towers of a recommender: tables that are looked up, an MLP each, negatives from the batch."""

    def tower(count):
        return {"table": floats(count, width), "w1": floats(width, 4 * width), "w2": floats(4 * width, width)}

    def towers_loss(params, user, item):
        one, other = (
            jax.nn.relu(tower["table"][ids] @ tower["w1"]) @ tower["w2"]
            for tower, ids in ((params["user"], user), (params["item"], item))
        )
        return cross_entropy(one @ other.T, jnp.arange(one.shape[0]))

    return trained(towers_loss, {"user": tower(users), "item": tower(items)}, ints(batch), ints(batch))


class Residual(nn.Module):
    features: int
    stride: int = 1

    @nn.compact
    def __call__(self, x):
        y = nn.relu(nn.GroupNorm(4)(nn.Conv(self.features, (1, 1), use_bias=False)(x)))
        y = nn.relu(nn.GroupNorm(4)(nn.Conv(self.features, (3, 3), (self.stride,) * 2, use_bias=False)(y)))
        y = nn.GroupNorm(4)(nn.Conv(4 * self.features, (1, 1), use_bias=False)(y))
        if x.shape != y.shape:
            x = nn.Conv(4 * self.features, (1, 1), (self.stride,) * 2, use_bias=False)(x)
        return nn.relu(x + y)


class ResNet(nn.Module):
    width: int
    stages: tuple[int, ...]

    @nn.compact
    def __call__(self, images):
        x = nn.relu(nn.GroupNorm(4)(nn.Conv(self.width, (7, 7), (2, 2), use_bias=False)(images)))
        x = nn.max_pool(x, (3, 3), (2, 2), "SAME")
        for stage, count in enumerate(self.stages):
            for block in range(count):
                x = Residual(self.width * 2**stage, 2 if stage and not block else 1)(x)
        return nn.Dense(128)(x.mean((1, 2)))


def resnet(width=8, batch=16, side=32, stages=(1, 1)) -> Built:
    """A ResNet of bottlenecks; ResNet-50 is width 64, side 224, stages 3, 4, 6, 3."""
    model = ResNet(width, stages)

    def resnet_loss(params, images, labels):
        return cross_entropy(model.apply(params, images), labels)

    params = abstract(model.init, jax.random.key(0), floats(batch, side, side, 3))
    return trained(resnet_loss, params, floats(batch, side, side, 3), ints(batch))


class UNet(nn.Module):
    width: int
    depth: int = 2

    @nn.compact
    def __call__(self, x):
        down = []
        for level in range(self.depth):
            x = nn.relu(nn.Conv(self.width * 2**level, (3, 3))(x))
            down.append(x)
            x = nn.max_pool(x, (2, 2), (2, 2))
        x = nn.relu(nn.Conv(self.width * 2**self.depth, (3, 3))(x))
        for level in reversed(range(self.depth)):
            x = nn.ConvTranspose(self.width * 2**level, (2, 2), (2, 2))(x)
            x = nn.relu(nn.Conv(self.width * 2**level, (3, 3))(jnp.concatenate((x, down[level]), -1)))
        return nn.Conv(3, (1, 1))(x)


def unet(width=8, batch=16, side=16) -> Built:
    """A U-Net that removes noise from images."""
    model = UNet(width)

    def unet_loss(params, images, noise):
        return ((model.apply(params, images + noise) - noise) ** 2).mean()

    params = abstract(model.init, jax.random.key(0), floats(batch, side, side, 3))
    return trained(unet_loss, params, *[floats(batch, side, side, 3)] * 2)


def lstm(width=32, batch=16, length=16) -> Built:
    """A language model of one LSTM, scanned over time, its four gates in one matrix."""
    params = {
        "embed": floats(96, width), "gates": floats(2 * width, 4 * width), "bias": floats(4 * width),
        "head": floats(width, 96),
    }  # fmt: skip

    def lstm_loss(params, tokens):
        def step(carry, x):
            hidden, cell = carry
            gates = jnp.concatenate((x, hidden), -1) @ params["gates"] + params["bias"]
            into, forget, out, new = jnp.split(gates, 4, -1)
            cell = jax.nn.sigmoid(forget) * cell + jax.nn.sigmoid(into) * jnp.tanh(new)
            hidden = jax.nn.sigmoid(out) * jnp.tanh(cell)
            return (hidden, cell), hidden

        x = params["embed"][tokens[:, :-1]]
        start = jnp.zeros((x.shape[0], width))
        _, hidden = jax.lax.scan(step, (start, start), x.swapaxes(0, 1))
        return cross_entropy(hidden.swapaxes(0, 1) @ params["head"], tokens[:, 1:])

    return trained(lstm_loss, params, ints(batch, length + 1))


def moe(width=32, tokens=128, experts=8, chosen=2) -> Built:
    """A layer of experts: tokens sorted by expert, then `ragged_dot`."""
    params = {
        "router": floats(width, experts), "up": floats(experts, width, 4 * width),
        "down": floats(experts, 4 * width, width),
    }  # fmt: skip

    def moe_loss(params, x, y):
        weights, picked = jax.lax.top_k(jax.nn.softmax(x @ params["router"]), chosen)
        order = jnp.argsort(picked.reshape(-1))
        sizes = jnp.bincount(picked.reshape(-1), length=experts)
        rows = x[order // chosen]
        hidden = jax.nn.gelu(jax.lax.ragged_dot(rows, params["up"], sizes))
        found = jax.lax.ragged_dot(hidden, params["down"], sizes) * weights.reshape(-1)[order][:, None]
        return ((jnp.zeros_like(x).at[order // chosen].add(found) - y) ** 2).mean()

    return trained(moe_loss, params, floats(tokens, width), floats(tokens, width))


class Vit(nn.Module):
    width: int
    layers: int

    @nn.compact
    def __call__(self, images):
        x = nn.Conv(self.width, (4, 4), (4, 4))(images)
        x = x.reshape(x.shape[0], -1, self.width)
        first = self.param("class", nn.initializers.zeros, (1, 1, self.width))
        x = jnp.concatenate((jnp.broadcast_to(first, (x.shape[0], 1, self.width)), x), 1)
        for _ in range(self.layers):
            normed = nn.LayerNorm()(x)
            x = x + nn.MultiHeadDotProductAttention(8)(normed, normed)
            x = x + nn.Dense(self.width)(nn.gelu(nn.Dense(4 * self.width)(nn.LayerNorm()(x))))
        return nn.Dense(32)(x[:, 0])


def vit(width=32, batch=16, side=16, layers=2) -> Built:
    """A vision transformer of patches and a class token."""
    model = Vit(width, layers)

    def vit_loss(params, images, labels):
        return cross_entropy(model.apply(params, images), labels)

    params = abstract(model.init, jax.random.key(0), floats(batch, side, side, 3))
    return trained(vit_loss, params, floats(batch, side, side, 3), ints(batch))


def decode(width=32, batch=16, length=64, heads=4, layers=2) -> Built:
    """One token of a server for each row, with a cache of keys and values, which is donated."""
    size = width // heads
    layer = {
        **{name: floats(width, heads, size) for name in "qkv"}, "o": floats(heads, size, width),
        "up": floats(width, 4 * width), "down": floats(4 * width, width),
    }  # fmt: skip
    params = {"embed": floats(96, width), "layers": [layer] * layers}
    cache = [{name: floats(batch, length, heads, size) for name in "kv"}] * layers

    def decode_step(params, cache, tokens, place):
        x, new = params["embed"][tokens], []
        for one, kept in zip(params["layers"], cache, strict=True):
            query, key, value = (jnp.einsum("bd,dhk->bhk", x, one[name]) for name in "qkv")
            kept = {
                name: jax.lax.dynamic_update_slice(kept[name], now[:, None], (0, place, 0, 0))
                for name, now in (("k", key), ("v", value))
            }
            scores = jnp.einsum("bhk,bthk->bht", query, kept["k"])
            scores = jnp.where(jnp.arange(length) <= place, scores, -1e9)
            x = x + jnp.einsum("bht,bthk,hkd->bd", jax.nn.softmax(scores), kept["v"], one["o"])
            x = x + jax.nn.gelu(x @ one["up"]) @ one["down"]
            new.append(kept)
        return new, (x @ params["embed"].T).argmax(-1)

    return jax.jit(decode_step, donate_argnums=1), (params, cache, ints(batch), jax.ShapeDtypeStruct((), jnp.int32))


PROGRAMS: dict[str, Callable[..., Built]] = {
    "linen_transformer": linen_transformer, "nnx_transformer": nnx_transformer, "gpt2": gpt2, "two_towers": two_towers,
    "resnet": resnet, "unet": unet, "lstm": lstm, "moe": moe, "vit": vit, "decode": decode,
}  # fmt: skip
