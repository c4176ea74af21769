"""A tree of gradients is gathered side by side, reshaped and summed."""

import jax
import jax.numpy as jnp
from jax import P
from planted import array

KIND, FINDS, MESH = "movement", "gathered-to-sum", {"dp": 8}


def summed(gradients):
    def each(g):
        parts = jax.lax.all_gather(g, "dp", axis=0, tiled=True)
        return jnp.sum(parts.reshape(8, *g.shape), axis=0) / 8

    return jax.tree.map(each, gradients)


def program(mesh, average):
    def step(params, x):
        def loss(params):
            return jnp.square(jnp.tanh(x @ params["a"]) @ params["b"]).mean()

        return jax.tree.map(lambda w, g: w - 0.1 * g, params, average(jax.grad(loss)(params)))

    mapped = jax.shard_map(step, mesh=mesh, in_specs=(P(), P("dp")), out_specs=P(), check_vma=False)
    params = {"a": array(mesh, (64, 128)), "b": array(mesh, (128, 64))}
    return jax.jit(mapped, donate_argnums=0), (params, array(mesh, (64, 64), "dp"))


def mistake(mesh):
    return program(mesh, summed)


def clean(mesh):
    return program(mesh, lambda g: jax.lax.pmean(g, "dp"))
