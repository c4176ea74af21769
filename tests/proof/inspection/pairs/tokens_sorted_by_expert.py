"""Tokens that are split over devices are sorted by their expert: all keys are gathered, and all rows follow."""

import jax
import jax.numpy as jnp
from jax import P
from planted import array

KIND, FINDS, MESH = "movement", "unexpected-collective", {"dp": 8}


def by_expert(x, router):
    return x[jnp.argsort((x @ router).argmax(-1))]


def program(mesh, in_shards):
    def layer(weights, x):
        rows = by_expert
        if in_shards:
            rows = jax.shard_map(by_expert, mesh=mesh, in_specs=(P("dp"), P()), out_specs=P("dp"), check_vma=False)
        return jax.nn.relu(rows(x, weights["router"]) @ weights["up"])

    weights = {"router": array(mesh, (128, 8)), "up": array(mesh, (128, 256))}
    return jax.jit(layer), (weights, array(mesh, (4096, 128), "dp"))


def mistake(mesh):
    return program(mesh, False)


def clean(mesh):
    return program(mesh, True)
