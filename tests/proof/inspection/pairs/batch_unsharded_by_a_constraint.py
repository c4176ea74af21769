"""A constraint with an empty spec makes activations whole between layers that want the batch split."""

import jax
import jax.numpy as jnp
from jax import P
from jax.lax import with_sharding_constraint as constrain
from planted import array

KIND, FINDS, MESH = "movement", "unsharding-constraint", {"dp": 8}


def program(mesh, spec):
    def forward(w, x):
        x = jnp.tanh(x @ w)
        x = constrain(x, jax.NamedSharding(mesh, spec))
        x = jnp.tanh(x @ w)
        return constrain(x, jax.NamedSharding(mesh, P("dp")))

    return jax.jit(forward), (array(mesh, (64, 64)), array(mesh, (128, 64), "dp"))


def mistake(mesh):
    return program(mesh, P())


def clean(mesh):
    return program(mesh, P("dp"))
