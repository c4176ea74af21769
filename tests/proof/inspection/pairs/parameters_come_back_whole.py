"""A train step that returns whole what it took split."""

import jax
import jax.numpy as jnp
from jax import P
from jax.lax import with_sharding_constraint as constrain
from planted import array

KIND, FINDS, MESH = "state", "state-changed", {"fsdp": 8}


def program(mesh, spec):
    def step(w, x):
        def loss(w):
            return jnp.square(constrain(x @ w, jax.NamedSharding(mesh, P("fsdp", None)))).mean()

        gradient = constrain(jax.grad(loss)(w), jax.NamedSharding(mesh, P("fsdp", None)))
        return constrain(w - 0.1 * gradient, jax.NamedSharding(mesh, spec))

    return jax.jit(step, donate_argnums=0), (array(mesh, (64, 128), "fsdp", None), array(mesh, (64, 64), "fsdp"))


def mistake(mesh):
    return program(mesh, P())


def clean(mesh):
    return program(mesh, P("fsdp", None))
