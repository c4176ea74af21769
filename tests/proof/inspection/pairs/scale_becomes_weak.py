"""A loss scale of a strict dtype is replaced by a Python number."""

import jax
import jax.numpy as jnp
from planted import array

KIND, FINDS, MESH = "state", "state-changed", {"dp": 8}


def program(mesh, new):
    def step(w, scale, x):
        gradient = jax.grad(lambda w: scale * jnp.square(x @ w).mean())(w) / scale
        return {"w": w - 0.1 * gradient, "scale": new(jnp.isfinite(gradient).all(), scale)}

    def stepped(state, x):
        return step(state["w"], state["scale"], x)

    state = {"w": array(mesh, (64, 64)), "scale": array(mesh, ())}
    return jax.jit(stepped, donate_argnums=0), (state, array(mesh, (64, 64), "dp"))


def mistake(mesh):
    return program(mesh, lambda finite, scale: jnp.where(finite, 1024.0, 1.0))


def clean(mesh):
    return program(mesh, lambda finite, scale: jnp.where(finite, scale, scale / 2))
