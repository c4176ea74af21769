"""Dropout inside of shard_map drops the same in the rows of every device: their keys are equal."""

import jax
import jax.numpy as jnp
from jax import P
from planted import array

KIND, FINDS, MESH = "wrong", "same-random-bits", {"dp": 8}


def program(mesh, folded):
    def body(weights, key, x, y):
        use = jax.random.fold_in(key, jax.lax.axis_index("dp")) if folded else key

        def loss(weights):
            hidden = jax.nn.relu(x @ weights["up"])
            keep = jax.random.bernoulli(use, 0.9, hidden.shape)
            hidden = jnp.where(keep, hidden / 0.9, 0.0)
            return jnp.mean((hidden @ weights["down"] - y) ** 2)

        gradients = jax.lax.pmean(jax.grad(loss)(weights), "dp")
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients)

    specs = {"up": P(), "down": P()}
    mapped = jax.shard_map(body, mesh=mesh, in_specs=(specs, P(), P("dp"), P("dp")), out_specs=specs, check_vma=False)
    weights = {"up": array(mesh, (64, 256)), "down": array(mesh, (256, 64))}
    rows = array(mesh, (128, 64), "dp")
    return jax.jit(mapped, donate_argnums=0), (weights, jax.random.key(0), rows, rows)


def mistake(mesh):
    return program(mesh, False)


def clean(mesh):
    return program(mesh, True)
