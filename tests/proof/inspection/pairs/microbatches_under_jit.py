"""Accumulation under jit: the partitioner sums each microbatch's gradient of whole weights."""

import jax
import jax.numpy as jnp
from jax import P
from planted import array

KIND, FINDS, MESH = "movement", "sum-in-loop", {"dp": 8}


def gradients(w, xs):
    def microbatch(total, x):
        return total + jax.grad(lambda w: jnp.square(jnp.tanh(x @ w)).mean())(w), None

    return jax.lax.scan(microbatch, jnp.zeros_like(w), xs)[0]


def mistake(mesh):
    def step(w, xs):
        return w - 0.1 * gradients(w, xs)

    return jax.jit(step, donate_argnums=0), (array(mesh, (64, 64)), array(mesh, (4, 64, 64), None, "dp"))


def clean(mesh):
    def step(w, xs):
        def mapped(w, xs):
            return jax.lax.pmean(gradients(w, xs), "dp")

        specs = (P(), P(None, "dp"))
        return w - 0.1 * jax.shard_map(mapped, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=False)(w, xs)

    return jax.jit(step, donate_argnums=0), (array(mesh, (64, 64)), array(mesh, (4, 64, 64), None, "dp"))
