"""The weights of a recurrent layer are gathered in every time step, by hand."""

import jax
import jax.numpy as jnp
from jax import P
from planted import array

KIND, FINDS, MESH = "movement", "gathered-twice", {"fsdp": 8}


def program(mesh, in_loop):
    def body(weights, xs):
        def gather(w):
            return jax.lax.all_gather(w, "fsdp", tiled=True)

        whole = None if in_loop else gather(weights)

        def cell(state, x):
            w = gather(weights) if in_loop else whole
            state = jnp.tanh(jnp.concatenate([x, state], axis=-1) @ w)
            return state, state

        return jax.lax.scan(cell, jnp.zeros((xs.shape[1], 128)), xs)[1]

    mapped = jax.shard_map(
        body, mesh=mesh, in_specs=(P("fsdp"), P(None, "fsdp")), out_specs=P(None, "fsdp"), check_vma=False
    )
    return jax.jit(mapped), (array(mesh, (256, 128), "fsdp"), array(mesh, (16, 64, 128), None, "fsdp"))


def mistake(mesh):
    return program(mesh, True)


def clean(mesh):
    return program(mesh, False)
