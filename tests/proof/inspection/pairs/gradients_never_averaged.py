"""Data parallel training by hand, whose gradients nobody averages: the replicas drift apart."""

import jax
import jax.numpy as jnp
from jax import P
from planted import array

KIND, FINDS, MESH = "wrong", "missing-sum", {"dp": 8}


def program(mesh, average):
    def step(params, x):
        def loss(params):
            return jnp.square(jnp.tanh(x @ params["a"]) @ params["b"]).mean()

        value, gradients = jax.value_and_grad(loss)(params)
        gradients = average(gradients)
        return jax.tree.map(lambda w, g: w - 0.1 * g, params, gradients), jax.lax.pmean(value, "dp")

    mapped = jax.shard_map(step, mesh=mesh, in_specs=(P(), P("dp")), out_specs=P(), check_vma=False)
    params = {"a": array(mesh, (64, 128)), "b": array(mesh, (128, 64))}
    return jax.jit(mapped, donate_argnums=0), (params, array(mesh, (32, 64), "dp"))


def mistake(mesh):
    return program(mesh, lambda g: g)


def clean(mesh):
    return program(mesh, lambda g: jax.lax.pmean(g, "dp"))
