"""Gradients are summed whole, then scattered as a mean: the second one changes nothing."""

import jax
import jax.numpy as jnp
from jax import P
from planted import array

KIND, FINDS, MESH = "wrong", "reduced-twice", {"fsdp": 8}


def program(mesh, first):
    def step(w, x):
        whole = jax.lax.all_gather(w, "fsdp", tiled=True)
        gradient = jax.grad(lambda w: jnp.square(jnp.tanh(x @ w)).mean())(whole)
        if first:
            gradient = jax.lax.psum(gradient, "fsdp")
        return w - 0.1 * jax.lax.psum_scatter(gradient, "fsdp", tiled=True) / 8

    specs = (P("fsdp"), P("fsdp"))
    mapped = jax.shard_map(step, mesh=mesh, in_specs=specs, out_specs=P("fsdp"), check_vma=False)
    return jax.jit(mapped, donate_argnums=0), (array(mesh, (256, 256), "fsdp"), array(mesh, (64, 256), "fsdp"))


def mistake(mesh):
    return program(mesh, True)


def clean(mesh):
    return program(mesh, False)
