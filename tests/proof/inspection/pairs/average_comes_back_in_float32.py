"""A moving average kept in bfloat16 is updated in float32."""

import jax
import jax.numpy as jnp
from planted import array

KIND, FINDS, MESH = "state", "state-changed", {"dp": 8}


def program(mesh, cast):
    def step(state, x):
        gradient = jax.grad(lambda w: jnp.square(x @ w).mean())(state["w"])
        w = state["w"] - 0.1 * gradient
        average = 0.99 * state["average"].astype(jnp.float32) + 0.01 * w
        return {"w": w, "average": cast(average)}

    state = {"w": array(mesh, (64, 64)), "average": array(mesh, (64, 64), dtype=jnp.bfloat16)}
    return jax.jit(step, donate_argnums=0), (state, array(mesh, (64, 64), "dp"))


def mistake(mesh):
    return program(mesh, lambda one: one)


def clean(mesh):
    return program(mesh, lambda one: one.astype(jnp.bfloat16))
