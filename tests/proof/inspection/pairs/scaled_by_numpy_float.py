"""Queries in bfloat16 are divided by a NumPy number, which makes attention float32."""

import jax
import jax.numpy as jnp
import numpy as np
from planted import array

KIND, FINDS, MESH = "waste", "wide-product", {"dp": 8}


def program(mesh, scale):
    def attend(q, k, v):
        with jax.numpy_dtype_promotion("standard"):
            scores = jnp.einsum("bqd,bkd->bqk", q / scale, k)
            weights = jax.nn.softmax(scores.astype(jnp.float32)).astype(k.dtype)
            return jnp.einsum("bqk,bkd->bqd", weights, v)

    return jax.jit(attend), (array(mesh, (8, 64, 64), "dp", dtype=jnp.bfloat16),) * 3


def mistake(mesh):
    return program(mesh, np.sqrt(64))


def clean(mesh):
    return program(mesh, float(np.sqrt(64)))
