"""A table of biases between positions is whole, where positions are split."""

import jax
import jax.numpy as jnp
from planted import array

KIND, FINDS, MESH = "waste", "whole-beside-batch", {"sp": 8}


def program(mesh, spec):
    def forward(q, k, bias):
        scores = jnp.einsum("qd,kd->qk", q, k) + bias
        return jax.nn.softmax(scores) @ k

    return jax.jit(forward), (array(mesh, (512, 64), "sp"), array(mesh, (512, 64)), array(mesh, (512, 512), *spec))


def mistake(mesh):
    return program(mesh, ())


def clean(mesh):
    return program(mesh, ("sp",))
