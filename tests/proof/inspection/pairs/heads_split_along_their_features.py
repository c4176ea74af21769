"""Attention whose projections are split along the features of each head: scores are partial sums."""

import jax
import jax.numpy as jnp
from planted import array

KIND, FINDS, MESH = "movement", "split-contraction", {"dp": 2, "tp": 4}


def program(mesh, heads, features):
    def attention(weights, x):
        q, k, v = (jnp.einsum("btd,dhe->bthe", x, weights[name]) for name in "qkv")
        scores = jax.nn.softmax(jnp.einsum("bthe,bshe->bhts", q, k) / 5.0)
        return x + jnp.einsum("bhts,bshe,hed->btd", scores, v, weights["o"])

    weights = {name: array(mesh, (64, 4, 32), None, heads, features) for name in "qkv"}
    weights["o"] = array(mesh, (4, 32, 64), heads, features)
    return jax.jit(attention), (weights, array(mesh, (8, 256, 64), "dp"))


def mistake(mesh):
    return program(mesh, None, "tp")


def clean(mesh):
    return program(mesh, "tp", None)
