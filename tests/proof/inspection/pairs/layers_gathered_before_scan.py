"""The stack of layers is made whole before the scan that needs one layer at a time."""

import jax
import jax.numpy as jnp
from jax import P
from jax.lax import with_sharding_constraint as constrain
from planted import array

KIND, FINDS, MESH = "movement", "hoisted-gather", {"fsdp": 8}


def program(mesh, spec):
    def loss(ws, x):
        ws = constrain(ws, jax.NamedSharding(mesh, spec))

        def layer(x, w):
            return constrain(jnp.tanh(x @ w), jax.NamedSharding(mesh, P("fsdp", None))), None

        return jnp.square(jax.lax.scan(layer, x, ws)[0]).mean()

    return jax.jit(loss), (array(mesh, (6, 128, 128), None, "fsdp", None), array(mesh, (64, 128), "fsdp"))


def mistake(mesh):
    return program(mesh, P())


def clean(mesh):
    return program(mesh, P(None, "fsdp", None))
