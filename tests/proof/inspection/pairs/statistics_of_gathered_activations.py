"""A batch norm gathers all activations for their mean and variance."""

import jax
import jax.numpy as jnp
from jax import P
from planted import array

KIND, FINDS, MESH = "movement", "gathered-to-sum", {"dp": 8}


def program(mesh, gathered):
    def norm(x, scale):
        if gathered:
            every = jax.lax.all_gather(x, "dp", tiled=True)
            mean, square = every.mean((0, 1)), jnp.square(every).mean((0, 1))
        else:
            mean, square = jax.lax.pmean((x.mean((0, 1)), jnp.square(x).mean((0, 1))), "dp")
        return (x - mean) * jax.lax.rsqrt(square - mean**2 + 1e-5) * scale

    mapped = jax.shard_map(norm, mesh=mesh, in_specs=(P("dp"), P()), out_specs=P("dp"), check_vma=False)
    return jax.jit(mapped), (array(mesh, (64, 64, 128), "dp"), array(mesh, (128,)))


def mistake(mesh):
    return program(mesh, True)


def clean(mesh):
    return program(mesh, False)
