"""out_shardings split the other dim than the arguments do."""

import jax
import jax.numpy as jnp
from jax import P
from jax.lax import with_sharding_constraint as constrain
from planted import array

KIND, FINDS, MESH = "state", "state-changed", {"fsdp": 8}


def program(mesh, spec):
    def step(params, x):
        def loss(params):
            return jnp.square(constrain(x @ params["w"], jax.NamedSharding(mesh, P("fsdp", None)))).mean()

        gradients = constrain(jax.grad(loss)(params), {"w": jax.NamedSharding(mesh, P("fsdp", None))})
        return jax.tree.map(lambda w, g: w - 0.1 * g, params, gradients)

    out = {"w": jax.NamedSharding(mesh, spec)}
    jitted = jax.jit(step, donate_argnums=0, out_shardings=out)
    return jitted, ({"w": array(mesh, (64, 128), "fsdp", None)}, array(mesh, (64, 64), "fsdp"))


def mistake(mesh):
    return program(mesh, P(None, "fsdp"))


def clean(mesh):
    return program(mesh, P("fsdp", None))
