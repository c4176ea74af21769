"""A target network is not donated; its new value takes the donated buffer of a moment of equal shape."""

import jax
import jax.numpy as jnp
import optax
from planted import array

KIND, FINDS, MESH = "state", "not-donated", {"dp": 8}
OPTIMIZER = optax.adam(1e-3)


def values(weights, x):
    return jnp.tanh(x @ weights["in"]) @ weights["out"]


def program(mesh, names):
    def step(online, target, moments, x):
        def loss(online):
            return jnp.mean((values(online, x) - jax.lax.stop_gradient(values(target, x)) - 1.0) ** 2)

        updates, moments = OPTIMIZER.update(jax.grad(loss)(online), moments)
        online = optax.apply_updates(online, updates)
        return online, optax.incremental_update(online, target, 0.01), moments

    weights = {"in": array(mesh, (64, 1024)), "out": array(mesh, (1024, 16))}
    args = weights, weights, jax.eval_shape(OPTIMIZER.init, weights), array(mesh, (256, 64), "dp")
    return jax.jit(step, donate_argnames=names), args


def mistake(mesh):
    return program(mesh, ("online", "moments"))


def clean(mesh):
    return program(mesh, ("online", "target", "moments"))
