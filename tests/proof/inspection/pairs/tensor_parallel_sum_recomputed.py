"""Rematerialized layers repeat their sum over tp in the backward pass."""

import jax
import jax.numpy as jnp
from jax import P
from jax.ad_checkpoint import checkpoint_name
from planted import array

KIND, FINDS, MESH = "movement", "recomputed-collective", {"dp": 2, "tp": 4}


def program(mesh, policy):
    def layer(x, w):
        def inner(x):
            y = jax.lax.psum(jnp.tanh(x @ w[0]) @ w[1], "tp")
            return x + jnp.tanh(checkpoint_name(y, "summed"))

        return jax.checkpoint(inner, policy=policy)(x)

    def body(ws, x):
        for w in ws:
            x = layer(x, w)
        return jax.lax.pmean(jnp.square(x).mean(), "dp")

    specs = ([(P(None, "tp"), P("tp"))] * 3, P("dp"))
    mapped = jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=P())
    ws = [(array(mesh, (64, 256), None, "tp"), array(mesh, (256, 64), "tp"))] * 3
    return jax.jit(jax.grad(mapped)), (ws, array(mesh, (256, 64), "dp"))


def mistake(mesh):
    return program(mesh, None)


def clean(mesh):
    return program(mesh, jax.checkpoint_policies.save_only_these_names("summed"))
