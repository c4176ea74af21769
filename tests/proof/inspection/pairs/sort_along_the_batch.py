"""Losses are sorted along the batch that dp splits."""

import jax
import jax.numpy as jnp
from planted import array

KIND, FINDS, MESH = "waste", "unexpected-collective", {"dp": 8}


def program(mesh, axis):
    def forward(w, x):
        return jnp.sort(jnp.tanh(x @ w), axis=axis)[:, ::2]

    return jax.jit(forward), (array(mesh, (64, 256)), array(mesh, (512, 64), "dp"))


def mistake(mesh):
    return program(mesh, 0)


def clean(mesh):
    return program(mesh, 1)
