"""A decode step that moves its cache to another sharding and back."""

import jax
import jax.numpy as jnp
from jax import P
from jax.lax import with_sharding_constraint as constrain
from planted import array

KIND, FINDS, MESH = "movement", "moved-state", {"dp": 2, "tp": 4}


def program(mesh, inside):
    def decode(cache, x, position):
        cache = constrain(cache, jax.NamedSharding(mesh, inside))
        cache = jax.lax.dynamic_update_slice_in_dim(cache, x[:, None], position, axis=1)
        scores = jnp.einsum("bhk,bshk->bhs", x, cache)
        return constrain(cache, jax.NamedSharding(mesh, P("dp", None, "tp"))), scores.max()

    cache = array(mesh, (8, 64, 8, 16), "dp", None, "tp")
    args = (cache, array(mesh, (8, 8, 16), "dp", "tp"), array(mesh, (), dtype=jnp.int32))
    return jax.jit(decode, donate_argnums=0), args


def mistake(mesh):
    return program(mesh, P("dp"))


def clean(mesh):
    return program(mesh, P("dp", None, "tp"))
