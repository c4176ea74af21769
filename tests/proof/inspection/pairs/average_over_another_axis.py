"""An average in the same state tree is split over another axis than its parameter."""

import jax
import jax.numpy as jnp
from jax import P
from jax.lax import with_sharding_constraint as constrain
from planted import array

KIND, FINDS, MESH = "state", "mislaid-state", {"fsdp": 4, "tp": 2}


def program(mesh, spec):
    def step(state, x):
        def loss(params):
            y = constrain(x @ params["w"], jax.NamedSharding(mesh, P("fsdp", "tp")))
            return jnp.square(y).mean()

        laid = {"w": jax.NamedSharding(mesh, P("fsdp", "tp"))}
        params = jax.tree.map(
            lambda w, g: w - 0.1 * g, state["params"], constrain(jax.grad(loss)(state["params"]), laid)
        )
        ema = jax.tree.map(lambda old, new: 0.99 * old + 0.01 * new, state["ema"], params)
        return {"params": params, "ema": ema}

    state = {"params": {"w": array(mesh, (128, 256), "fsdp", "tp")}, "ema": {"w": array(mesh, (128, 256), *spec)}}
    out = jax.tree.map(lambda one: one.sharding, state)
    return jax.jit(step, donate_argnums=0, out_shardings=out), (state, array(mesh, (64, 128), "fsdp"))


def mistake(mesh):
    return program(mesh, ("tp", "fsdp"))


def clean(mesh):
    return program(mesh, ("fsdp", "tp"))
