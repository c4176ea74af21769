"""Weights read by ring attention: their gradients are averaged over dp, and over the parts of a sequence by nobody."""

import jax
import jax.numpy as jnp
from jax import P
from planted import array

KIND, FINDS, MESH = "wrong", "missing-sum", {"sp": 4, "dp": 2}


def attention(q, k, v):
    ring = [(i, (i + 1) % 4) for i in range(4)]

    def fold(carry, k, v):
        total, out = carry
        weights = jnp.exp(jnp.einsum("bqd,bkd->bqk", q, k))
        return total + weights.sum(-1), out + jnp.einsum("bqk,bkd->bqd", weights, v)

    def hop(carry, _):
        folded, k, v = carry
        return (fold(folded, k, v), jax.lax.ppermute(k, "sp", ring), jax.lax.ppermute(v, "sp", ring)), None

    (folded, k, v), _ = jax.lax.scan(hop, ((jnp.zeros(q.shape[:2]), jnp.zeros_like(q)), k, v), None, length=3)
    total, out = fold(folded, k, v)
    return out / total[..., None]


def program(mesh, axes):
    def step(w, x):
        def loss(w):
            q, k, v = (x @ one for one in w)
            return jnp.square(attention(q, k, v)).mean()

        return w - 0.1 * jax.lax.pmean(jax.grad(loss)(w), axes)

    specs = (P(), P("dp", "sp"))
    mapped = jax.shard_map(step, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=False)
    return jax.jit(mapped, donate_argnums=0), (array(mesh, (3, 64, 64)), array(mesh, (4, 128, 64), "dp", "sp"))


def mistake(mesh):
    return program(mesh, "dp")


def clean(mesh):
    return program(mesh, ("dp", "sp"))
