"""The stack is split along its layers, so all of them are gathered before the scan."""

import jax
import jax.numpy as jnp
from jax import P
from jax.lax import with_sharding_constraint as constrain
from planted import array

KIND, FINDS, MESH = "movement", "hoisted-gather", {"fsdp": 8}


def program(mesh, spec):
    def loss(ws, x):
        def layer(x, w):
            return constrain(jnp.tanh(x @ w), jax.NamedSharding(mesh, P("fsdp", None))), None

        return jnp.square(jax.lax.scan(layer, x, ws)[0]).mean()

    return jax.jit(loss), (array(mesh, (8, 128, 128), *spec), array(mesh, (64, 128), "fsdp"))


def mistake(mesh):
    return program(mesh, ("fsdp",))


def clean(mesh):
    return program(mesh, (None, "fsdp"))
