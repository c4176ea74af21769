"""Gradients of each example are gathered whole before they are averaged."""

import jax
import jax.numpy as jnp
from jax import P
from jax.lax import with_sharding_constraint as constrain
from planted import array

KIND, FINDS, MESH = "movement", "gathered-to-sum", {"dp": 8}


def program(mesh, spec):
    def step(w, x):
        each = jax.vmap(jax.grad(lambda w, x: jnp.square(jnp.tanh(x @ w)).mean()), (None, 0))(w, x)
        each = constrain(each, jax.NamedSharding(mesh, spec))
        return w - 0.1 * each.mean(axis=0)

    return jax.jit(step, donate_argnums=0), (array(mesh, (32, 32)), array(mesh, (64, 32), "dp"))


def mistake(mesh):
    return program(mesh, P())


def clean(mesh):
    return program(mesh, P("dp"))
