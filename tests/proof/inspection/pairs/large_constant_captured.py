"""A table that the function closes over is a constant of the program."""

import jax
import jax.numpy as jnp
from planted import array

KIND, FINDS, MESH = "waste", "captured-constant", {"dp": 8}


def program(mesh, captured):
    table = jnp.ones((512, 256))

    def forward(x):
        return x @ table

    if captured:
        return jax.jit(forward), (array(mesh, (64, 512), "dp"),)
    return jax.jit(lambda table, x: x @ table), (array(mesh, (512, 256)), array(mesh, (64, 512), "dp"))


def mistake(mesh):
    return program(mesh, True)


def clean(mesh):
    return program(mesh, False)
