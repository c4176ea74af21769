"""Devices leave a solver's loop when their own error is small; inside they still exchange."""

import jax
import jax.numpy as jnp
from jax import P
from planted import array

KIND, FINDS, MESH = "wrong", "branched-collective", {"dp": 8}


def program(mesh, local):
    def body(a, x):
        def going_on(carry):
            return carry[1] > 1e-3

        def iterate(carry):
            x, _ = carry
            new = 0.5 * x + 0.5 * jax.lax.pmean(jnp.tanh(a @ x), "dp")
            error = jnp.abs(new - x).max()
            return new, (error if local else jax.lax.pmax(error, "dp"))

        return jax.lax.while_loop(going_on, iterate, (x, jnp.float32(1)))[0]

    mapped = jax.shard_map(body, mesh=mesh, in_specs=(P("dp"), P(None, "dp")), out_specs=P(None, "dp"), check_vma=False)
    return jax.jit(mapped), (array(mesh, (512, 64), "dp"), array(mesh, (64, 64), None, "dp"))


def mistake(mesh):
    return program(mesh, True)


def clean(mesh):
    return program(mesh, False)
