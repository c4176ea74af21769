"""Layers of Flax without a dtype make bfloat16 data float32, as their parameters are."""

import jax
import jax.numpy as jnp
from flax import linen as nn
from planted import array

KIND, FINDS, MESH = "waste", "wide-product", {"data": 8}


def program(mesh, dtype):
    class Network(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(128, dtype=dtype)(nn.relu(nn.Dense(512, dtype=dtype)(x)))

    network = Network()
    params = jax.eval_shape(network.init, jax.random.key(0), jnp.zeros((1, 128), jnp.bfloat16))
    params = jax.tree.map(lambda one: array(mesh, one.shape), params)
    return jax.jit(network.apply), (params, array(mesh, (256, 128), "data", dtype=jnp.bfloat16))


def mistake(mesh):
    return program(mesh, None)


def clean(mesh):
    return program(mesh, jnp.bfloat16)
