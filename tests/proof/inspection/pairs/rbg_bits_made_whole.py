"""Random bits of the rbg algorithm: every device makes all of them and keeps its part."""

import jax
import jax.numpy as jnp
from jax import P
from jax.lax import with_sharding_constraint as constrain
from planted import array

KIND, FINDS, MESH = "waste", "unpartitioned-bits", {"dp": 8}


def program(mesh, impl):
    def forward(w, x, seed):
        key = jax.random.key(seed, impl=impl)
        keep = constrain(jax.random.bernoulli(key, 0.9, (256, 128)), jax.NamedSharding(mesh, P("dp")))
        return jnp.where(keep, jnp.tanh(x @ w), 0) / 0.9

    return jax.jit(forward), (array(mesh, (64, 128)), array(mesh, (256, 64), "dp"), array(mesh, (), dtype=jnp.int32))


def mistake(mesh):
    return program(mesh, "rbg")


def clean(mesh):
    return program(mesh, "threefry2x32")
