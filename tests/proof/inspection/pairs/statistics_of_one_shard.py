"""Batch statistics of a device's own examples, returned as those of the batch."""

import jax
from jax import P
from planted import array

KIND, FINDS, MESH = "wrong", "missing-sum", {"dp": 8}


def program(mesh, average):
    def body(x):
        mean = average(x.mean(axis=0))
        return (x - mean) * 2, mean

    mapped = jax.shard_map(body, mesh=mesh, in_specs=P("dp"), out_specs=(P("dp"), P()), check_vma=False)
    return mapped, (array(mesh, (64, 512), "dp"),)


def mistake(mesh):
    return program(mesh, lambda one: one)


def clean(mesh):
    return program(mesh, lambda one: jax.lax.pmean(one, "dp"))
