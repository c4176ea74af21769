"""A train step of a Llama in plain JAX, as one would first write it: what `train_step.py` holds meshwright's against.

Imported by it, and no program of its own. Parameters are split over all devices along one dim, tokens along the batch,
and nothing else is said of where values lie: `jax.jit` finds the collectives. Layers are scanned over and whole blocks
made again in backward, attention goes through scores, and the update is Optax's AdamW of clipped gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from meshwright.description.step.model import ModelConfig

OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(3e-3, 0.9, 0.95, weight_decay=0.1))


def naive_step(model: ModelConfig, tokens: np.ndarray, num_devices: int) -> Callable[[], Array]:
    """A function that takes the next step on tokens [b, s + 1] over so many devices, and returns the loss."""
    devices = jax.devices()[:num_devices]
    mesh = jax.make_mesh((num_devices,), ("data",), axis_types=(AxisType.Auto,), devices=devices)
    params = _drawn(model, mesh)
    moments = OPTIMIZER.init(params)
    lying = jax.tree.map(lambda x: x.sharding if x.ndim else NamedSharding(mesh, P()), (params, moments))
    params, moments = jax.device_put((params, moments), lying)
    batch = [jax.device_put(part, NamedSharding(mesh, P("data"))) for part in (tokens[:, :-1], tokens[:, 1:])]
    update = jax.jit(partial(_updated, model=model), donate_argnums=(0, 1), out_shardings=(*lying, None))

    def step() -> Array:
        nonlocal params, moments
        params, moments, loss = jax.block_until_ready(update(params, moments, *batch))
        return loss

    return step


def _updated(params: Any, moments: Any, inputs: Array, targets: Array, model: ModelConfig) -> tuple[Any, Any, Array]:
    """Parameters and moments after a step, and the loss before it."""
    loss, gradients = jax.value_and_grad(_loss)(params, inputs, targets, model)
    updates, moments = OPTIMIZER.update(gradients, moments, params)
    return optax.apply_updates(params, updates), moments, loss


def _drawn(model: ModelConfig, mesh: jax.sharding.Mesh) -> dict[str, Any]:
    """Parameters at random, matrices split along the first of their own dims and norm scales whole."""
    draw = np.random.default_rng(0)

    def matrix(*shape: int) -> Array:
        split = NamedSharding(mesh, P(*[None] * (len(shape) - 2), "data", None))
        return jax.device_put(draw.normal(0, 0.02, shape).astype(np.float32), split)

    def scale(*shape: int) -> Array:
        return jax.device_put(np.ones(shape, np.float32), NamedSharding(mesh, P()))

    n, d, f, heads = model.num_layers, model.embed, model.mlp, model.num_heads * model.head_dim
    layers = {name: matrix(n, d, heads) for name in ("query", "key", "value")}
    layers |= {"output": matrix(n, heads, d), "gate": matrix(n, d, f), "up": matrix(n, d, f), "down": matrix(n, f, d)}
    layers |= {name: scale(n, d) for name in ("attention_norm", "mlp_norm")}
    tables = {"embedding": matrix(model.vocab, d), "unembedding": matrix(d, model.vocab)}
    return tables | {"final_norm": scale(d), "layers": layers}


def _loss(params: Any, inputs: Array, targets: Array, model: ModelConfig) -> Array:
    """The mean loss in nats."""

    @jax.checkpoint
    def layer(x: Array, own: Any) -> tuple[Array, None]:
        x = x + _attention(_norm(x, own["attention_norm"]), own, model)
        h = _norm(x, own["mlp_norm"])
        return x + (jax.nn.silu(h @ own["gate"]) * (h @ own["up"])) @ own["down"], None

    x, _ = jax.lax.scan(layer, params["embedding"][inputs], params["layers"])
    logits = _norm(x, params["final_norm"]) @ params["unembedding"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()


def _attention(h: Array, own: Any, model: ModelConfig) -> Array:
    """What causal attention with as many kv heads as query heads adds to the stream."""
    b, s, _ = h.shape
    query, key, value = (
        (h @ own[name]).reshape(b, s, model.num_heads, model.head_dim) for name in ("query", "key", "value")
    )
    query, key = _rotated(query, model), _rotated(key, model)
    scores = jnp.einsum("bshd,bthd->bhst", query, key) / model.head_dim**0.5
    weights = jax.nn.softmax(jnp.where(jnp.tri(s, dtype=bool), scores, -jnp.inf))
    return jnp.einsum("bhst,bthd->bshd", weights, value).reshape(b, s, -1) @ own["output"]


def _rotated(x: Array, model: ModelConfig) -> Array:
    """Rotary embedding of heads [b, s, h, d]."""
    half = model.head_dim // 2
    angles = jnp.arange(x.shape[1])[:, None] * 10_000.0 ** (-jnp.arange(half) / half)
    cos, sin = jnp.cos(angles)[:, None], jnp.sin(angles)[:, None]
    first, second = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def _norm(x: Array, scale: Array) -> Array:
    """RMSNorm."""
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-5) * scale
