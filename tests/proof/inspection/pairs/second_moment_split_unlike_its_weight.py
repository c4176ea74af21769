"""A weight and its moments are arguments themselves, split over a part of the mesh: the second moment by columns."""

import jax
import jax.numpy as jnp
from jax import P
from jax.lax import with_sharding_constraint as constrain
from planted import array

KIND, FINDS, MESH = "state", "mislaid-state", {"fsdp": 4, "dp": 2}


def program(mesh, spec):
    whole, rows = jax.NamedSharding(mesh, P()), jax.NamedSharding(mesh, P(("dp", "fsdp")))
    split = array(mesh, (128, 256), "fsdp")

    def step(w, mean, square, x):
        def loss(w):
            return jnp.square(constrain(jax.nn.silu(x @ constrain(w, whole)), rows)).mean()

        gradient = constrain(jax.grad(loss)(w), split.sharding)
        mean, square = 0.9 * mean + 0.1 * gradient, 0.99 * square + 0.01 * gradient**2
        return w - 1e-3 * mean / (jnp.sqrt(square) + 1e-8), mean, square

    square = array(mesh, (128, 256), *spec)
    out = (split.sharding, split.sharding, square.sharding)
    jitted = jax.jit(step, donate_argnums=(0, 1, 2), out_shardings=out)
    return jitted, (split, split, square, array(mesh, (128, 128), ("dp", "fsdp")))


def mistake(mesh):
    return program(mesh, (None, "fsdp"))


def clean(mesh):
    return program(mesh, ("fsdp",))
