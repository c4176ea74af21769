"""A pure_callback computes a schedule in every step of a fori_loop."""

import jax
import jax.numpy as jnp
import numpy as np
from planted import array

KIND, FINDS, MESH = "waste", "host-call-in-loop", {"dp": 8}


def program(mesh, inside):
    def rate(step):
        return jax.pure_callback(lambda step: np.float32(0.1) / (1 + step), jax.ShapeDtypeStruct((), jnp.float32), step)

    def train(w, x):
        first = rate(jnp.float32(0))

        def step(number, w):
            gradient = jax.grad(lambda w: jnp.square(x @ w).mean())(w)
            return w - (rate(number.astype(jnp.float32)) if inside else first) * gradient

        return jax.lax.fori_loop(0, 4, step, w)

    return jax.jit(train, donate_argnums=0), (array(mesh, (64, 64)), array(mesh, (64, 64), "dp"))


def mistake(mesh):
    return program(mesh, True)


def clean(mesh):
    return program(mesh, False)
