"""Microbatches in a Python loop, each with its own sum over devices."""

import jax
import jax.numpy as jnp
from jax import P
from planted import array

KIND, FINDS, MESH = "movement", "sum-in-loop", {"dp": 8}


def program(mesh, inside):
    def step(w, xs):
        total = jnp.zeros_like(w)
        for number in range(4):
            gradient = jax.grad(lambda w, x=xs[number]: jnp.square(jnp.tanh(x @ w)).mean())(w)
            total = total + (jax.lax.psum(gradient, "dp") / 8 if inside else gradient)
        return w - 0.1 * (total if inside else jax.lax.pmean(total, "dp"))

    mapped = jax.shard_map(step, mesh=mesh, in_specs=(P(), P(None, "dp")), out_specs=P(), check_vma=False)
    return jax.jit(mapped, donate_argnums=0), (array(mesh, (64, 64)), array(mesh, (4, 64, 64), None, "dp"))


def mistake(mesh):
    return program(mesh, True)


def clean(mesh):
    return program(mesh, False)
