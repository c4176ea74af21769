"""Only the first device along tp enters the branch with the sum."""

import jax
import jax.numpy as jnp
from jax import P
from planted import array

KIND, FINDS, MESH = "wrong", "branched-collective", {"tp": 8}


def program(mesh, inside):
    def body(x):
        index = jax.lax.axis_index("tp")
        if inside:
            return jax.lax.cond(index == 0, lambda: jax.lax.psum(x, "tp"), lambda: jnp.zeros_like(x))
        total = jax.lax.psum(x, "tp")
        return jax.lax.cond(index == 0, lambda: total, lambda: jnp.zeros_like(x))

    mapped = jax.shard_map(body, mesh=mesh, in_specs=P("tp"), out_specs=P("tp"), check_vma=False)
    return jax.jit(mapped), (array(mesh, (64, 64), "tp"),)


def mistake(mesh):
    return program(mesh, True)


def clean(mesh):
    return program(mesh, False)
