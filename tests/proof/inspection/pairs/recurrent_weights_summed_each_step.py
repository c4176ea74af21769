"""A recurrent net under jit: its weights' gradient is summed over devices in every time step."""

import jax
import jax.numpy as jnp
from jax import P
from planted import array

KIND, FINDS, MESH = "movement", "sum-in-loop", {"dp": 8}


def loss(params, xs):
    def cell(h, x):
        return jnp.tanh(h @ params["h"] + x @ params["x"]), None

    h = jnp.zeros_like(xs[0])
    return jnp.square(jax.lax.scan(cell, h, xs)[0]).mean()


def stepped(gradients):
    def step(params, xs):
        return jax.tree.map(lambda w, g: w - 0.1 * g, params, gradients(params, xs))

    return jax.jit(step, donate_argnums=0)


def arguments(mesh):
    return {"h": array(mesh, (64, 64)), "x": array(mesh, (64, 64))}, array(mesh, (16, 64, 64), None, "dp")


def mistake(mesh):
    return stepped(jax.grad(loss)), arguments(mesh)


def clean(mesh):
    def gradients(params, xs):
        return jax.lax.pmean(jax.grad(loss)(params, xs), "dp")

    specs = (P(), P(None, "dp"))
    return stepped(jax.shard_map(gradients, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=False)), arguments(mesh)
