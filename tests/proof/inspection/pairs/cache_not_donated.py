"""A decode step that returns its cache in new buffers."""

import jax
import jax.numpy as jnp
from planted import array

KIND, FINDS, MESH = "state", "not-donated", {"dp": 2, "tp": 4}


def program(mesh, donated):
    def decode(params, cache, tokens, position):
        x = params["embedding"][tokens]
        q, k, v = (jnp.einsum("bd,dhk->bhk", x, params[name]) for name in "qkv")
        keys = jax.lax.dynamic_update_slice_in_dim(cache["k"], k[:, None], position, 1)
        values = cache["v"].at[:, position].set(v)
        scores = jnp.einsum("bhk,bshk->bhs", q, keys)
        weights = jax.nn.softmax(jnp.where(jnp.arange(512) <= position, scores, -1e9))
        return jnp.einsum("bhs,bshk->bhk", weights, values), {"k": keys, "v": values}

    params = {name: array(mesh, (64, 8, 16), None, "tp") for name in "qkv"} | {"embedding": array(mesh, (1024, 64))}
    cache = {name: array(mesh, (16, 512, 8, 16), "dp", None, "tp") for name in "kv"}
    args = params, cache, array(mesh, (16,), "dp", dtype=jnp.int32), array(mesh, (), dtype=jnp.int32)
    return jax.jit(decode, donate_argnums=1 if donated else ()), args


def mistake(mesh):
    return program(mesh, False)


def clean(mesh):
    return program(mesh, True)
