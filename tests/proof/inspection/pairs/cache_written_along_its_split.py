"""A cache of keys split along positions is written at one position a step."""

import jax
import jax.numpy as jnp
from jax import P
from planted import array

KIND, FINDS, MESH = "movement", "moved-state", {'dp': 2, 'tp': 4}


def program(mesh, spec):
    def decode(cache, w, x, position):
        key = jnp.einsum("bd,dhk->bhk", x, w)[:, None]
        cache = jax.lax.dynamic_update_slice_in_dim(cache, key, position, axis=1)
        scores = jnp.einsum("bhk,bshk->bhs", key[:, 0], cache)
        return cache, scores.max(axis=-1)

    cache = array(mesh, (8, 64, 8, 16), *spec)
    w = array(mesh, (64, 8, 16), *(None, spec[2] if len(spec) > 2 else None, None))
    out = (cache.sharding, jax.NamedSharding(mesh, P("dp")))
    args = (cache, w, array(mesh, (8, 64), "dp"), array(mesh, (), dtype=jnp.int32))
    return jax.jit(decode, donate_argnums=0, out_shardings=out), args


def mistake(mesh):
    return program(mesh, ("dp", "tp"))


def clean(mesh):
    return program(mesh, ("dp", None, "tp"))
