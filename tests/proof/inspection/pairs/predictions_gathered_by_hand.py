"""Predictions of all examples are gathered on every device inside of shard_map, only to be returned."""

import jax
import jax.numpy as jnp
from jax import P
from planted import array

KIND, FINDS, MESH = "movement", "gathered-result", {"data": 8}


def program(mesh, is_gathered):
    def predict(into, out, x):
        chances = jax.nn.softmax(jnp.tanh(x @ into) @ out)
        return jax.lax.all_gather(chances, "data", tiled=True) if is_gathered else chances

    specs = (P(), P(), P("data"))
    to = P() if is_gathered else P("data")
    mapped = jax.shard_map(predict, mesh=mesh, in_specs=specs, out_specs=to, check_vma=False)
    return jax.jit(mapped), (array(mesh, (64, 128)), array(mesh, (128, 256)), array(mesh, (512, 64), "data"))


def mistake(mesh):
    return program(mesh, True)


def clean(mesh):
    return program(mesh, False)
