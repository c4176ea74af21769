"""With check_vma=True JAX has summed the gradients of replicated weights already."""

import jax
import jax.numpy as jnp
from jax import P
from planted import array

KIND, FINDS, MESH = "wrong", "reduced-twice", {"dp": 8}


def program(mesh, finish):
    def step(w, x):
        gradient = jax.grad(lambda w: jnp.square(x @ w).sum())(w)
        return w - 0.1 * finish(gradient)

    mapped = jax.shard_map(step, mesh=mesh, in_specs=(P(), P("dp")), out_specs=P())
    return jax.jit(mapped, donate_argnums=0), (array(mesh, (64, 64)), array(mesh, (32, 64), "dp"))


def mistake(mesh):
    return program(mesh, lambda g: jax.lax.psum(g, "dp"))


def clean(mesh):
    return program(mesh, lambda g: g)
