"""Frozen weights of NumPy inside of a loss that is differentiated."""

import jax
import jax.numpy as jnp
import numpy as np
from planted import array

KIND, FINDS, MESH = "waste", "captured-constant", {"dp": 8}


FROZEN = np.ones((256, 512), np.float32)


def loss(w, frozen, x):
    return jnp.square(jnp.tanh(x @ frozen) @ w).mean()


def mistake(mesh):
    gradient = jax.grad(lambda w, x: loss(w, FROZEN, x))
    return jax.jit(gradient), (array(mesh, (512, 64)), array(mesh, (64, 256), "dp"))


def clean(mesh):
    return jax.jit(jax.grad(loss)), (array(mesh, (512, 64)), array(mesh, (256, 512)), array(mesh, (64, 256), "dp"))
