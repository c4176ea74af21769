"""Keys go round a ring over an axis that does not split them: all hold the same."""

import jax
from jax import P
from planted import array

KIND, FINDS, MESH = "wrong", "sent-copies", {"sp": 8}


def shifted(x, axis="sp"):
    return jax.lax.ppermute(x, axis, [(i, (i + 1) % 8) for i in range(8)])


def program(mesh, spec):
    def body(q, k):
        def hop(_, carry):
            k, total = carry
            k = shifted(k)
            return k, total + q @ k.T @ k

        return jax.lax.fori_loop(0, 7, hop, (k, q @ k.T @ k))[1]

    mapped = jax.shard_map(body, mesh=mesh, in_specs=(P("sp"), spec), out_specs=P("sp"), check_vma=False)
    return jax.jit(mapped), (array(mesh, (256, 64), "sp"), array(mesh, (256, 64), *spec))


def mistake(mesh):
    return program(mesh, P())


def clean(mesh):
    return program(mesh, P("sp"))
