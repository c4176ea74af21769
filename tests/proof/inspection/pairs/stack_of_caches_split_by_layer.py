"""Caches of all layers are one stack that fsdp splits by layer, scanned in a decode step."""

import jax
import jax.numpy as jnp
from jax import P
from planted import array

KIND, FINDS, MESH = "movement", "moved-state", {"fsdp": 8}


def program(mesh, spec):
    def decode(caches, x, position):
        def layer(x, cache):
            cache = jax.lax.dynamic_update_slice_in_dim(cache, x[:, None], position, axis=1)
            scores = jax.nn.softmax(jnp.einsum("bk,bsk->bs", x, cache))
            return jnp.einsum("bs,bsk->bk", scores, cache), cache

        x, caches = jax.lax.scan(layer, x, caches)
        return caches, x

    caches = array(mesh, (8, 16, 64, 32), *spec)
    out = (caches.sharding, jax.NamedSharding(mesh, P("fsdp")))
    args = (caches, array(mesh, (16, 32), "fsdp"), array(mesh, (), dtype=jnp.int32))
    return jax.jit(decode, donate_argnums=0, out_shardings=out), args


def mistake(mesh):
    return program(mesh, ("fsdp",))


def clean(mesh):
    return program(mesh, (None, "fsdp"))
