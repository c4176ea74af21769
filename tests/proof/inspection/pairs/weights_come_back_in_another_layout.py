"""New weights are asked for in the other memory layout than the old ones have."""

import jax
import jax.numpy as jnp
from jax import P
from jax.experimental.layout import Format, Layout
from planted import array

KIND, FINDS, MESH = "state", "state-changed", {"dp": 8}


def program(mesh, order):
    def step(w, x):
        return w - 0.1 * jax.grad(lambda w: jnp.sin(x @ w).mean())(w)

    out = Format(Layout(order), jax.NamedSharding(mesh, P()))
    args = array(mesh, (512, 256)), array(mesh, (64, 512), "dp")
    return jax.jit(step, out_shardings=out, donate_argnums=0), args


def mistake(mesh):
    return program(mesh, (1, 0))


def clean(mesh):
    return program(mesh, (0, 1))
