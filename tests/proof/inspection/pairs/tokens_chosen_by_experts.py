"""Experts choose their tokens among those of all devices; clean, tokens choose experts, and labels pick their logit."""

import jax
import jax.numpy as jnp
from planted import array

KIND, FINDS, MESH = "movement", "unexpected-collective", {"dp": 8}


def program(mesh, by_expert):
    def loss(weights, x, labels):
        scores = jax.nn.softmax(x @ weights["router"])
        if by_expert:
            gates, _ = jax.lax.top_k(jax.lax.stop_gradient(scores.T), 256)
            x += gates.mean(axis=1) @ weights["experts"]
        else:
            gates, chosen = jax.lax.top_k(scores, 2)
            x += jnp.einsum("nk,nkd->nd", gates, weights["experts"][chosen])
        logits = jax.nn.log_softmax(x @ weights["out"])
        return -logits[jnp.arange(len(labels)), labels].mean()

    def step(weights, x, labels):
        gradients = jax.grad(loss)(weights, x, labels)
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients)

    shapes = {"router": (64, 16), "experts": (16, 64), "out": (64, 128)}
    weights = {name: array(mesh, shape) for name, shape in shapes.items()}
    args = weights, array(mesh, (4096, 64), "dp"), array(mesh, (4096,), "dp", dtype=jnp.int32)
    return jax.jit(step, donate_argnums=0), args


def mistake(mesh):
    return program(mesh, True)


def clean(mesh):
    return program(mesh, False)
