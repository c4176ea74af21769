"""Dropout with random bits that every device makes whole or sends around."""

import jax
import jax.numpy as jnp
from jax import P
from jax.lax import with_sharding_constraint as constrain
from planted import array

KIND, FINDS, MESH = "waste", "unpartitioned-bits", {"dp": 8}


def program(mesh, partitionable):
    def forward(w, x, seed):
        with jax.threefry_partitionable(partitionable):
            keep = jax.random.bernoulli(jax.random.key(seed), 0.9, (256, 128))
            keep = constrain(keep, jax.NamedSharding(mesh, P("dp")))
        return jnp.where(keep, jnp.tanh(x @ w), 0) / 0.9

    return jax.jit(forward), (array(mesh, (64, 128)), array(mesh, (256, 64), "dp"), array(mesh, (), dtype=jnp.int32))


def mistake(mesh):
    return program(mesh, False)


def clean(mesh):
    return program(mesh, True)
