"""Gradients are averaged over devices in every microbatch, and added up."""

import jax
import jax.numpy as jnp
from jax import P
from planted import array

KIND, FINDS, MESH = "movement", "sum-in-loop", {"dp": 8}


def program(mesh, inside):
    def step(w, xs):
        def microbatch(total, x):
            gradient = jax.grad(lambda w: jnp.square(jnp.tanh(x @ w)).mean())(w)
            return total + (jax.lax.pmean(gradient, "dp") if inside else gradient), None

        total = jax.lax.scan(microbatch, jnp.zeros_like(w), xs)[0]
        return w - 0.1 * (total if inside else jax.lax.pmean(total, "dp"))

    mapped = jax.shard_map(step, mesh=mesh, in_specs=(P(), P(None, "dp")), out_specs=P(), check_vma=False)
    return jax.jit(mapped, donate_argnums=0), (array(mesh, (64, 64)), array(mesh, (4, 64, 64), None, "dp"))


def mistake(mesh):
    return program(mesh, True)


def clean(mesh):
    return program(mesh, False)
