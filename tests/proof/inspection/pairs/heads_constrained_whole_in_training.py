"""Queries, keys and values are constrained to be whole over heads; a train step gathers forward and backward."""

import jax
import jax.numpy as jnp
from jax import P
from jax.lax import with_sharding_constraint as constrain
from planted import array

KIND, FINDS, MESH = "movement", "unsharding-constraint", {"dp": 2, "tp": 4}


def program(mesh, spec):
    def loss(params, x):
        q, k, v = (jnp.einsum("bsd,dhk->bshk", x, params[name]) for name in "qkv")
        q, k, v = (constrain(one, jax.NamedSharding(mesh, spec)) for one in (q, k, v))
        weights = jax.nn.softmax(jnp.einsum("bqhk,bshk->bhqs", q, k))
        return jnp.square(jnp.einsum("bhqs,bshk,hkd->bqd", weights, v, params["o"])).mean()

    def step(params, x):
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss)(params, x))

    params = {name: array(mesh, (64, 8, 16), None, "tp") for name in "qkv"} | {"o": array(mesh, (8, 16, 64), "tp")}
    out = jax.tree.map(lambda p: p.sharding, params)
    return jax.jit(step, donate_argnums=0, out_shardings=out), (params, array(mesh, (8, 32, 64), "dp"))


def mistake(mesh):
    return program(mesh, P("dp"))


def clean(mesh):
    return program(mesh, P("dp", None, "tp"))
