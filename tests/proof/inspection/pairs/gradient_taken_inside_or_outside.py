"""A summed loss differentiated inside of shard_map, or outside of it, where JAX divides by the devices."""

import jax
import jax.numpy as jnp
from jax import P
from planted import array

KIND, FINDS, MESH = "wrong", "reduced-twice", {"dp": 4}


def loss(w, x):
    return jax.lax.psum(jnp.square(jnp.tanh(x @ w)).mean(), "dp")


def mistake(mesh):
    def body(w, x):
        value, gradient = jax.value_and_grad(loss)(w, x)
        return value, jax.lax.psum(gradient, "dp")

    mapped = jax.shard_map(body, mesh=mesh, in_specs=(P(), P("dp")), out_specs=P(), check_vma=False)
    return jax.jit(mapped), (array(mesh, (64, 64)), array(mesh, (32, 64), "dp"))


def clean(mesh):
    mapped = jax.shard_map(loss, mesh=mesh, in_specs=(P(), P("dp")), out_specs=P(), check_vma=False)
    return jax.jit(jax.value_and_grad(mapped)), (array(mesh, (64, 64)), array(mesh, (32, 64), "dp"))
