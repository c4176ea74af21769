"""An unrolled ring sum whose last part is the device's own again."""

import jax
import jax.numpy as jnp
from jax import P
from planted import array

KIND, FINDS, MESH = "wrong", "ring-too-long", {"sp": 8}


def shifted(x, axis="sp"):
    return jax.lax.ppermute(x, axis, [(i, (i + 1) % 8) for i in range(8)])


def program(mesh, sends):
    def body(x):
        total, part = x, x
        for _ in range(sends):
            part = shifted(part)
            total = total + jnp.sin(part)
        return total

    mapped = jax.shard_map(body, mesh=mesh, in_specs=P("sp"), out_specs=P("sp"), check_vma=False)
    return jax.jit(mapped), (array(mesh, (64, 64), "sp"),)


def mistake(mesh):
    return program(mesh, 8)


def clean(mesh):
    return program(mesh, 7)
