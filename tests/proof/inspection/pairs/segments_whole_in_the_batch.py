"""Packed rows: the ids of their segments are whole on every device, in the tree whose tokens are split."""

import jax
import jax.numpy as jnp
from planted import array

KIND, FINDS, MESH = "waste", "whole-beside-batch", {"dp": 8}


def program(mesh, axes):
    def forward(weights, batch):
        x = weights["embedding"][batch["tokens"]]
        segments = batch["segments"]
        scores = jnp.einsum("btd,bsd->bts", x @ weights["query"], x)
        scores = jnp.where(segments[:, :, None] == segments[:, None, :], scores, -1e9)
        return jnp.einsum("bts,bsd->btd", jax.nn.softmax(scores), x)

    weights = {"embedding": array(mesh, (256, 64)), "query": array(mesh, (64, 64))}
    ids = {"tokens": ("dp",), "segments": axes}
    batch = {name: array(mesh, (128, 256), *spec, dtype=jnp.int32) for name, spec in ids.items()}
    return jax.jit(forward), (weights, batch)


def mistake(mesh):
    return program(mesh, ())


def clean(mesh):
    return program(mesh, ("dp",))
