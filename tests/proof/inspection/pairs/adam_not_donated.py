"""A train step with Adam that keeps the old parameters and moments."""

import jax
import jax.numpy as jnp
import optax
from jax import P
from jax.lax import with_sharding_constraint as constrain
from planted import array

KIND, FINDS, MESH = "state", "not-donated", {"fsdp": 8}


def program(mesh, donated):
    optimizer = optax.adamw(1e-3)

    def step(params, moments, x):
        def loss(params):
            hidden = constrain(jax.nn.relu(x @ params["a"]), jax.NamedSharding(mesh, P("fsdp", None)))
            return jnp.square(constrain(hidden @ params["b"], jax.NamedSharding(mesh, P("fsdp", None)))).mean()

        gradients = jax.grad(loss)(params)
        updates, moments = optimizer.update(gradients, moments, params)
        return optax.apply_updates(params, updates), moments

    params = {"a": array(mesh, (512, 1024), None, "fsdp"), "b": array(mesh, (1024, 512), "fsdp")}
    moments = jax.eval_shape(optimizer.init, params)
    shardings = optax.tree.map_params(
        optimizer, lambda _, p: p.sharding, moments, params, transform_non_params=lambda _: jax.NamedSharding(mesh, P())
    )
    moments = jax.tree.map(lambda m, s: jax.ShapeDtypeStruct(m.shape, m.dtype, sharding=s), moments, shardings)
    out = (jax.tree.map(lambda p: p.sharding, params), shardings)
    jitted = jax.jit(step, donate_argnums=(0, 1) if donated else (), out_shardings=out)
    return jitted, (params, moments, array(mesh, (64, 512), "fsdp"))


def mistake(mesh):
    return program(mesh, False)


def clean(mesh):
    return program(mesh, True)
