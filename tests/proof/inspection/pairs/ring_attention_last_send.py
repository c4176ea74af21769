"""Ring attention that sends keys and values on after the last block too."""

import jax
import jax.numpy as jnp
from jax import P
from planted import array

KIND, FINDS, MESH = "wrong", "ring-too-long", {"sp": 8}


def shifted(x, axis="sp"):
    return jax.lax.ppermute(x, axis, [(i, (i + 1) % 8) for i in range(8)])


def attend(q, k, v, total):
    return total + jax.nn.softmax(q @ k.T) @ v


def program(mesh, wasted):
    def body(q, k, v):
        def hop(carry, _):
            k, v, total = carry
            total = attend(q, k, v, total)
            return (shifted(k), shifted(v), total), None

        def hop_first(carry, _):
            k, v, total = carry
            k, v = shifted(k), shifted(v)
            return (k, v, attend(q, k, v, total)), None

        if wasted:
            return jax.lax.scan(hop, (k, v, jnp.zeros_like(q)), length=8)[0][2]
        return jax.lax.scan(hop_first, (k, v, attend(q, k, v, jnp.zeros_like(q))), length=7)[0][2]

    mapped = jax.shard_map(body, mesh=mesh, in_specs=P("sp"), out_specs=P("sp"), check_vma=False)
    return jax.jit(mapped), (array(mesh, (256, 64), "sp"),) * 3


def mistake(mesh):
    return program(mesh, True)


def clean(mesh):
    return program(mesh, False)
