"""The gradient, inside of shard_map without check_vma, of a loss that is summed over devices."""

import jax
import jax.numpy as jnp
from jax import P
from planted import array

KIND, FINDS, MESH = "wrong", "reduced-twice", {"dp": 4}


def program(mesh, summed):
    def step(w, x):
        def loss(w):
            value = jnp.square(x @ w).sum()
            return jax.lax.psum(value, "dp") if summed else value

        gradient = jax.lax.psum(jax.grad(loss)(w), "dp")
        return w - 0.01 * gradient

    mapped = jax.shard_map(step, mesh=mesh, in_specs=(P(), P("dp")), out_specs=P(), check_vma=False)
    return jax.jit(mapped, donate_argnums=0), (array(mesh, (64, 64)), array(mesh, (32, 64), "dp"))


def mistake(mesh):
    return program(mesh, True)


def clean(mesh):
    return program(mesh, False)
