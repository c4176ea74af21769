"""Sampling takes the largest logits of a vocabulary that tp splits."""

import jax
from jax import P
from planted import array

KIND, FINDS, MESH = "waste", "unexpected-collective", {"dp": 2, "tp": 4}


def program(mesh, local):
    def sample(head, x):
        logits = x @ head
        if not local:
            return jax.lax.top_k(logits, 8)[0]

        def best(logits):
            mine = jax.lax.top_k(logits, 8)[0]
            return jax.lax.top_k(jax.lax.all_gather(mine, "tp", axis=1, tiled=True), 8)[0]

        return jax.shard_map(best, mesh=mesh, in_specs=P("dp", "tp"), out_specs=P("dp"), check_vma=False)(logits)

    return jax.jit(sample), (array(mesh, (64, 4096), None, "tp"), array(mesh, (64, 64), "dp"))


def mistake(mesh):
    return program(mesh, False)


def clean(mesh):
    return program(mesh, True)
