"""Tokens are exchanged between experts over an axis on which all devices have the same tokens."""

import jax
import jax.numpy as jnp
from jax import P
from planted import array

KIND, FINDS, MESH = "wrong", "sent-copies", {"dp": 2, "ep": 4}


def program(mesh, spec):
    def body(experts, x):
        groups = x.reshape(4, -1, x.shape[-1])
        groups = jax.lax.all_to_all(groups, "ep", 0, 0)
        y = jnp.tanh(jnp.einsum("gtd,df->gtf", groups, experts[0]))
        return jax.lax.all_to_all(y, "ep", 0, 0).reshape(x.shape)

    mapped = jax.shard_map(body, mesh=mesh, in_specs=(P("ep"), spec), out_specs=spec, check_vma=False)
    return jax.jit(mapped), (array(mesh, (4, 64, 64), "ep"), array(mesh, (128, 64), *spec))


def mistake(mesh):
    return program(mesh, P("dp"))


def clean(mesh):
    return program(mesh, P(("dp", "ep")))
