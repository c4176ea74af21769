"""Features of a batch are returned replicated, beside a loss."""

import jax
import jax.numpy as jnp
from jax import P
from jax.lax import with_sharding_constraint as constrain
from planted import array

KIND, FINDS, MESH = "movement", "gathered-result", {"dp": 8}


def program(mesh, spec):
    def forward(w, x):
        features = jax.nn.gelu(x @ w)
        return jnp.square(features).mean(), constrain(features, jax.NamedSharding(mesh, spec))

    return jax.jit(forward), (array(mesh, (64, 256)), array(mesh, (512, 64), "dp"))


def mistake(mesh):
    return program(mesh, P())


def clean(mesh):
    return program(mesh, P("dp"))
