"""The penalty of weights that all devices hold is inside of the sum over devices."""

import jax
import jax.numpy as jnp
from jax import P
from planted import array

KIND, FINDS, MESH = "wrong", "reduced-twice", {"dp": 8}


def program(mesh, inside):
    def loss(w, x):
        data, penalty = jnp.square(x @ w).sum(), 1e-3 * jnp.square(w).sum()
        return jax.lax.psum(data, "dp") + jax.lax.psum(penalty, "dp") if inside else jax.lax.psum(data, "dp") + penalty

    mapped = jax.shard_map(loss, mesh=mesh, in_specs=(P(), P("dp")), out_specs=P(), check_vma=False)
    return jax.jit(mapped), (array(mesh, (64, 64)), array(mesh, (32, 64), "dp"))


def mistake(mesh):
    return program(mesh, True)


def clean(mesh):
    return program(mesh, False)
