"""Each device runs its own experts, and its part of the result is declared the whole."""

import jax
import jax.numpy as jnp
from jax import P
from planted import array

KIND, FINDS, MESH = "wrong", "missing-sum", {"dp": 2, "ep": 4}


def program(mesh, combine):
    def body(experts, gates, x):
        index = jax.lax.axis_index("ep")
        mine = jax.lax.dynamic_slice_in_dim(gates, 2 * index, 2, axis=1)
        y = jnp.einsum("td,edf,te->tf", x, experts, mine)
        return combine(y)

    specs = (P("ep"), P("dp"), P("dp"))
    mapped = jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=P("dp"), check_vma=False)
    args = (array(mesh, (8, 64, 64), "ep"), array(mesh, (64, 8), "dp"), array(mesh, (64, 64), "dp"))
    return jax.jit(mapped), args


def mistake(mesh):
    return program(mesh, lambda y: y)


def clean(mesh):
    return program(mesh, lambda y: jax.lax.psum(y, "ep"))
