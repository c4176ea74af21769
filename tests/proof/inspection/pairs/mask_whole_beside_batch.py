"""A mask of every example is whole on every device beside a batch that is split."""

import jax
import jax.numpy as jnp
from planted import array

KIND, FINDS, MESH = "waste", "whole-beside-batch", {"dp": 8}


def program(mesh, spec):
    def forward(w, x, mask):
        scores = jnp.einsum("bqd,bkd->bqk", x @ w, x)
        return jax.nn.softmax(jnp.where(mask, scores, -1e9)) @ x

    args = (array(mesh, (64, 64)), array(mesh, (16, 128, 64), "dp"), array(mesh, (16, 128, 128), *spec, dtype=jnp.bool))
    return jax.jit(forward), args


def mistake(mesh):
    return program(mesh, ())


def clean(mesh):
    return program(mesh, ("dp",))
