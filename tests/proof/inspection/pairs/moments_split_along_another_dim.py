"""Moments are split along the other dim than their parameter."""

import jax
import jax.numpy as jnp
from jax import P
from jax.lax import with_sharding_constraint as constrain
from planted import array

KIND, FINDS, MESH = "state", "mislaid-state", {"fsdp": 8}


def program(mesh, spec):
    def step(params, moments, x):
        def loss(params):
            return jnp.square(constrain(x @ params["w"], jax.NamedSharding(mesh, P("fsdp", None)))).mean()

        gradients = constrain(jax.grad(loss)(params), {"w": jax.NamedSharding(mesh, P("fsdp", None))})
        moments = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, moments, gradients)
        return jax.tree.map(lambda w, m: w - 0.1 * m, params, moments), moments

    params, moments = {"w": array(mesh, (128, 256), "fsdp", None)}, {"w": array(mesh, (128, 256), *spec)}
    out = jax.tree.map(lambda one: one.sharding, (params, moments))
    return jax.jit(step, donate_argnums=(0, 1), out_shardings=out), (params, moments, array(mesh, (64, 128), "fsdp"))


def mistake(mesh):
    return program(mesh, (None, "fsdp"))


def clean(mesh):
    return program(mesh, ("fsdp", None))
