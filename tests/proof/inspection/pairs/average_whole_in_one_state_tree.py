"""An average of the weights, in the same tree as they, is whole on every device."""

import jax
import jax.numpy as jnp
from jax import P
from jax.lax import with_sharding_constraint as constrain
from planted import array

KIND, FINDS, MESH = "state", "replicated-states", {"fsdp": 8}


def program(mesh, spec):
    def step(state, x):
        def loss(params):
            return jnp.square(constrain(x @ params["w"], jax.NamedSharding(mesh, P("fsdp", None)))).mean()

        gradients = constrain(jax.grad(loss)(state["params"]), {"w": jax.NamedSharding(mesh, P("fsdp", None))})
        params = jax.tree.map(lambda w, g: w - 0.1 * g, state["params"], gradients)
        ema = jax.tree.map(lambda old, new: 0.99 * old + 0.01 * new, state["ema"], params)
        return {"params": params, "ema": ema}

    state = {"params": {"w": array(mesh, (128, 256), "fsdp", None)}, "ema": {"w": array(mesh, (128, 256), *spec)}}
    out = jax.tree.map(lambda one: one.sharding, state)
    return jax.jit(step, donate_argnums=0, out_shardings=out), (state, array(mesh, (64, 128), "fsdp"))


def mistake(mesh):
    return program(mesh, ())


def clean(mesh):
    return program(mesh, ("fsdp", None))
