"""A contrastive loss over a ring, written as a while loop that sends after the last comparison too."""

import jax
import jax.numpy as jnp
from jax import P
from planted import array

KIND, FINDS, MESH = "wrong", "ring-too-long", {"data": 8}


def program(mesh, turns):
    ring = [(i, (i + 1) % 8) for i in range(8)]

    def loss(own, other):
        def compare(total, part):
            return jnp.logaddexp(total, jax.nn.logsumexp(own @ part.T, -1))

        def turn(carry):
            count, part, total = carry
            return count + 1, jax.lax.ppermute(part, "data", ring), compare(total, part)

        start = 0, other, jnp.full(own.shape[0], -jnp.inf)
        _, last, total = jax.lax.while_loop(lambda carry: carry[0] < turns, turn, start)
        return total if turns == 8 else compare(total, last)

    mapped = jax.shard_map(loss, mesh=mesh, in_specs=P("data"), out_specs=P("data"), check_vma=False)
    return jax.jit(mapped), (array(mesh, (256, 64), "data"),) * 2


def mistake(mesh):
    return program(mesh, 8)


def clean(mesh):
    return program(mesh, 7)
