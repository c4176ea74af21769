"""Python adds up the gradients of all devices, or adds what was gathered as small integers: that no sum could do."""

import jax
import jax.numpy as jnp
from jax import P
from planted import array

KIND, FINDS, MESH = "movement", "gathered-to-sum", {"dp": 8}


def program(mesh, averaged):
    def step(w, x):
        return w - 0.1 * averaged(jax.grad(lambda w: jnp.square(jnp.tanh(x @ w)).mean())(w))

    mapped = jax.shard_map(step, mesh=mesh, in_specs=(P(), P("dp")), out_specs=P(), check_vma=False)
    return jax.jit(mapped, donate_argnums=0), (array(mesh, (256, 256)), array(mesh, (64, 256), "dp"))


def mistake(mesh):
    return program(mesh, lambda gradient: sum(jax.lax.all_gather(gradient, "dp")) / 8)


def clean(mesh):
    def compressed(gradient):
        scale = jnp.abs(gradient).max() / 127
        parts = jax.lax.all_gather(jnp.round(gradient / scale).astype(jnp.int8), "dp")
        scales = jax.lax.all_gather(scale, "dp")
        return (parts.astype(jnp.float32) * scales[:, None, None]).mean(0)

    return program(mesh, compressed)
