"""All logits are returned whole on every device."""

import jax
import jax.numpy as jnp
from jax import P
from planted import array

KIND, FINDS, MESH = "movement", "gathered-result", {"dp": 2, "tp": 4}


def program(mesh, spec):
    def forward(head, x):
        return jnp.tanh(x) @ head

    args = (array(mesh, (64, 1024), None, "tp"), array(mesh, (256, 64), "dp"))
    return jax.jit(forward, out_shardings=jax.NamedSharding(mesh, spec)), args


def mistake(mesh):
    return program(mesh, P())


def clean(mesh):
    return program(mesh, P("dp", "tp"))
