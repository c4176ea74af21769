"""Gradients of few examples on each device, larger than these, that nobody sums; or a sum divided by the devices."""

import jax
import jax.numpy as jnp
from jax import P
from planted import array

KIND, FINDS, MESH = "wrong", "missing-sum", {"dp": 8}


def program(mesh, summed):
    def step(w, x):
        gradient = jax.grad(lambda w: jnp.square(jnp.tanh(x @ w)).mean())(w)
        if summed:
            gradient = jax.lax.psum(gradient, "dp") / jax.lax.psum(1.0, "dp")
        return w - 0.1 * gradient

    mapped = jax.shard_map(step, mesh=mesh, in_specs=(P(), P("dp")), out_specs=P(), check_vma=False)
    return jax.jit(mapped, donate_argnums=0), (array(mesh, (256, 256)), array(mesh, (64, 256), "dp"))


def mistake(mesh):
    return program(mesh, False)


def clean(mesh):
    return program(mesh, True)
