"""bfloat16 parameters become float32 by a float32 learning rate."""

import jax
import jax.numpy as jnp
from planted import array

KIND, FINDS, MESH = "state", "state-changed", {"dp": 8}


def program(mesh, cast):
    def step(params, rate, x):
        def loss(params):
            return jnp.square((x @ params["w"]).astype(jnp.float32)).mean()

        with jax.numpy_dtype_promotion("standard"):
            return jax.tree.map(lambda w, g: cast(w - rate * g), params, jax.grad(loss)(params))

    args = ({"w": array(mesh, (64, 64), dtype=jnp.bfloat16)}, array(mesh, ()))
    return jax.jit(step, donate_argnums=0), (*args, array(mesh, (64, 64), "dp", dtype=jnp.bfloat16))


def mistake(mesh):
    return program(mesh, lambda one: one)


def clean(mesh):
    return program(mesh, lambda one: one.astype(jnp.bfloat16))
