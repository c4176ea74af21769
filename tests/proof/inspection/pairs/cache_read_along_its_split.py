"""A window of a cache is read at a moving position along the dim that tp splits."""

import jax
import jax.numpy as jnp
from jax import P
from planted import array

KIND, FINDS, MESH = "movement", "moved-state", {"dp": 2, "tp": 4}


def program(mesh, spec, heads):
    def decode(cache, key, position):
        cache = jax.lax.dynamic_update_slice_in_dim(cache, key[:, None], position, axis=1)
        window = jax.lax.dynamic_slice_in_dim(cache, position - 15, 16, axis=1)
        scores = jnp.einsum("bhk,bshk->bhs", key, window)
        return cache, scores.max(axis=-1)

    cache = array(mesh, (8, 64, 8, 16), *spec)
    out = (cache.sharding, jax.NamedSharding(mesh, P("dp", heads)))
    args = (cache, array(mesh, (8, 8, 16), "dp", heads), array(mesh, (), dtype=jnp.int32))
    return jax.jit(decode, donate_argnums=0, out_shardings=out), args


def mistake(mesh):
    return program(mesh, ("dp", "tp"), None)


def clean(mesh):
    return program(mesh, ("dp", None, "tp"), "tp")
