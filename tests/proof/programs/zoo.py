"""Train steps of other people's models in plain JAX, each with abstract arguments: `PROGRAMS[name]()`.

The default sizes are small enough to run on simulated devices. `zoo_flax` has more, in Flax.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

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


def conv_dense(width=8, batch=16, side=16, dense=64) -> Built:
    """An AlexNet: convolutions with few weights on many pixels, then dense layers with most of the weights."""
    params = {
        "conv_1": floats(3, 3, 3, width),
        "conv_2": floats(3, 3, width, width),
        "dense_1": floats(width * side * side // 16, dense),
        "dense_2": floats(dense, dense),
        "dense_3": floats(dense, 16),
    }

    def conv_dense_loss(params, images, labels):
        x = images
        for name, stride in (("conv_1", 1), ("conv_2", 4)):
            x = jax.lax.conv_general_dilated(
                x, params[name], (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
            )
            x = jax.nn.relu(x)
        x = x.reshape(x.shape[0], -1)
        for name in ("dense_1", "dense_2"):
            x = jax.nn.relu(x @ params[name])
        return cross_entropy(x @ params["dense_3"], labels)

    return trained(conv_dense_loss, params, floats(batch, side, side, 3), ints(batch))


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
    "gpt2": gpt2, "two_towers": two_towers, "conv_dense": conv_dense, "lstm": lstm, "moe": moe, "decode": decode,
}  # fmt: skip
