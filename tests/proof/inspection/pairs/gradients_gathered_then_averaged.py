"""Each device gathers all gradients and averages them itself."""

import jax
import jax.numpy as jnp
from jax import P
from planted import array

KIND, FINDS, MESH = "movement", "gathered-to-sum", {"dp": 8}


def program(mesh, average):
    def step(w, x):
        gradient = jax.grad(lambda w: jnp.square(jnp.tanh(x @ w)).mean())(w)
        return w - 0.1 * average(gradient)

    mapped = jax.shard_map(step, mesh=mesh, in_specs=(P(), P("dp")), out_specs=P(), check_vma=False)
    return jax.jit(mapped, donate_argnums=0), (array(mesh, (64, 64)), array(mesh, (64, 64), "dp"))


def mistake(mesh):
    return program(mesh, lambda g: jax.lax.all_gather(g, "dp").mean(axis=0))


def clean(mesh):
    return program(mesh, lambda g: jax.lax.pmean(g, "dp"))
