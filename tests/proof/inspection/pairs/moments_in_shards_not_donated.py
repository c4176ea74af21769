"""Moments are split and their weights whole (ZeRO stage 1), so updates are gathered; the moments are not donated."""

import jax
import jax.numpy as jnp
import optax
from jax import P
from jax.lax import with_sharding_constraint as constrain
from planted import array

KIND, FINDS, MESH = "state", "not-donated", {"dp": 8}


def program(mesh, donated):
    optimizer, whole = optax.adam(1e-3), jax.NamedSharding(mesh, P())

    def step(params, moments, x):
        def loss(params):
            return jnp.square(jax.nn.relu(x @ params["a"]) @ params["b"]).mean()

        gradients = constrain(jax.grad(loss)(params), jax.NamedSharding(mesh, P("dp")))
        updates, moments = optimizer.update(gradients, moments, params)
        return optax.apply_updates(params, constrain(updates, whole)), moments

    params = {"a": array(mesh, (256, 512)), "b": array(mesh, (512, 256))}
    moments = jax.tree.map(
        lambda one: array(mesh, one.shape, *["dp"] * bool(one.shape), dtype=one.dtype),
        jax.eval_shape(optimizer.init, params),
    )
    shardings = jax.tree.map(lambda one: one.sharding, (params, moments))
    jitted = jax.jit(step, donate_argnums=(0, 1) if donated else 0, out_shardings=shardings)
    return jitted, (params, moments, array(mesh, (128, 256), "dp"))


def mistake(mesh):
    return program(mesh, False)


def clean(mesh):
    return program(mesh, True)
