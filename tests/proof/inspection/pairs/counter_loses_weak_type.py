"""A step counter that begins as a Python number and comes back as an array's dtype."""

import jax
import jax.numpy as jnp
from planted import array

KIND, FINDS, MESH = "state", "state-changed", {"dp": 8}


def program(mesh, first):
    def step(state, x):
        gradient = jax.grad(lambda w: jnp.square(x @ w).mean())(state["w"])
        return {"w": state["w"] - 0.1 * gradient, "step": (state["step"] + 1).astype(jnp.int32)}

    state = {"w": array(mesh, (64, 64)), "step": first}
    return jax.jit(step, donate_argnums=0), (state, array(mesh, (64, 64), "dp"))


def mistake(mesh):
    return program(mesh, 0)


def clean(mesh):
    return program(mesh, jnp.int32(0))
