"""A ring that begins with the device's own part and sends as often as there are devices."""

import jax
from jax import P
from planted import array

KIND, FINDS, MESH = "wrong", "ring-too-long", {"sp": 8}


def shifted(x, axis="sp"):
    return jax.lax.ppermute(x, axis, [(i, (i + 1) % 8) for i in range(8)])


def program(mesh, sends):
    def body(x):
        def hop(_, carry):
            total, part = carry
            part = shifted(part)
            return total + part, part

        return jax.lax.fori_loop(0, sends, hop, (x, x))[0]

    mapped = jax.shard_map(body, mesh=mesh, in_specs=P("sp"), out_specs=P("sp"), check_vma=False)
    return jax.jit(mapped), (array(mesh, (64, 64), "sp"),)


def mistake(mesh):
    return program(mesh, 8)


def clean(mesh):
    return program(mesh, 7)
