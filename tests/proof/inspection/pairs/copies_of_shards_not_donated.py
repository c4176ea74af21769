"""HSDP: copies of shards, whose gradients the TPU compiler sums over all devices at once. The old shards are kept."""

import jax
import jax.numpy as jnp
from jax import P
from planted import array

KIND, FINDS, MESH = "state", "not-donated", {"fsdp": 4, "replica": 2}


def program(mesh, donated):
    whole, rows = jax.NamedSharding(mesh, P()), jax.NamedSharding(mesh, P(("replica", "fsdp")))
    params = {"a": array(mesh, (512, 1024), "fsdp"), "b": array(mesh, (1024, 512), None, "fsdp")}
    shards = jax.tree.map(lambda one: one.sharding, params)

    def step(params, momentum, x):
        def loss(params):
            used = jax.lax.with_sharding_constraint(params, whole)
            hidden = jax.lax.with_sharding_constraint(jax.nn.gelu(x @ used["a"]), rows)
            return jnp.square(jax.lax.with_sharding_constraint(hidden @ used["b"], rows)).mean()

        gradients = jax.lax.with_sharding_constraint(jax.grad(loss)(params), shards)
        momentum = jax.tree.map(lambda old, new: 0.9 * old + new, momentum, gradients)
        return jax.tree.map(lambda old, new: old - 0.1 * new, params, momentum), momentum

    jitted = jax.jit(step, donate_argnums=(0, 1) if donated else (), out_shardings=(shards, shards))
    return jitted, (params, params, array(mesh, (128, 512), ("replica", "fsdp")))


def mistake(mesh):
    return program(mesh, False)


def clean(mesh):
    return program(mesh, True)
