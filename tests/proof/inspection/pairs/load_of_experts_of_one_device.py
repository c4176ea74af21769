"""The balance of experts is of a device's own tokens. Embedding and head are whole beside experts split over ep."""

import jax
import jax.numpy as jnp
from jax import P
from planted import array

KIND, FINDS, MESH = "wrong", "missing-sum", {"ep": 4, "dp": 2}


def program(mesh, averaged):
    every = ("dp", "ep")

    def loss(params, tokens):
        x = params["embedding"][tokens]
        scores = jax.nn.softmax(x @ params["router"])
        parts = x.reshape(8, -1, 64) * scores.max(-1).reshape(8, -1, 1)
        sent = jax.lax.all_to_all(parts, "ep", 0, 1, tiled=True)
        made = jnp.einsum("ecf,efd->ecd", jax.nn.silu(jnp.einsum("ecd,edf->ecf", sent, params["a"])), params["b"])
        x = x + jax.lax.all_to_all(made, "ep", 1, 0, tiled=True).reshape(x.shape)
        return jnp.square(x @ params["head"]).mean() / 8, 8 * jnp.square(scores.mean(0)).sum()

    def step(params, tokens):
        gradients, balance = jax.grad(loss, has_aux=True)(params, tokens)
        summed = {name: jax.lax.psum(g, "dp" if name in "ab" else every) for name, g in gradients.items()}
        new = jax.tree.map(lambda w, g: w - 0.1 * g, params, summed)
        return new, jax.lax.pmean(balance, every) if averaged else balance

    shapes = {"embedding": (1024, 64), "router": (64, 8), "a": (8, 64, 256), "b": (8, 256, 64), "head": (64, 1024)}
    specs = {name: P("ep") if name in "ab" else P() for name in shapes}
    mapped = jax.shard_map(step, mesh=mesh, in_specs=(specs, P(every)), out_specs=(specs, P()), check_vma=False)
    params = {name: array(mesh, shape, *specs[name]) for name, shape in shapes.items()}
    return jax.jit(mapped, donate_argnums=0), (params, array(mesh, (2048,), every, dtype=jnp.int32))


def mistake(mesh):
    return program(mesh, False)


def clean(mesh):
    return program(mesh, True)
