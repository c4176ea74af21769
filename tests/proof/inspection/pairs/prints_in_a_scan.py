"""A debug print in the layer of a scan calls the host for every layer."""

import jax
import jax.numpy as jnp
from planted import array

KIND, FINDS, MESH = "waste", "host-call-in-loop", {"dp": 8}


def program(mesh, printed):
    def forward(ws, x):
        def layer(x, w):
            x = jnp.tanh(x @ w)
            if printed:
                jax.debug.print("norm {}", jnp.square(x).sum())
            return x, jnp.square(x).sum()

        x, norms = jax.lax.scan(layer, x, ws)
        if not printed:
            jax.debug.print("norms {}", norms)
        return x

    return jax.jit(forward), (array(mesh, (4, 64, 64)), array(mesh, (64, 64), "dp"))


def mistake(mesh):
    return program(mesh, True)


def clean(mesh):
    return program(mesh, False)
