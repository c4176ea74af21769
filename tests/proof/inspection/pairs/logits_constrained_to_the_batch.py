"""A constraint makes logits whole along the vocabulary, so the head is gathered and its product repeated."""

import jax
import jax.numpy as jnp
from jax import P
from jax.lax import with_sharding_constraint as constrain
from planted import array

KIND, FINDS, MESH = "movement", "unsharding-constraint", {"model": 4, "data": 2}


def program(mesh, spec):
    def loss(params, x, labels):
        logits = jnp.tanh(x @ params["w"]) @ params["head"]
        logits = constrain(logits, jax.NamedSharding(mesh, spec))
        return -(jax.nn.log_softmax(logits) * jax.nn.one_hot(labels, 4096)).sum(-1).mean()

    def step(params, x, labels):
        return jax.tree.map(lambda w, g: w - 0.1 * g, params, jax.grad(loss)(params, x, labels))

    params = {"w": array(mesh, (64, 64), None, "model"), "head": array(mesh, (64, 4096), None, "model")}
    x, labels = array(mesh, (8, 64, 64), "data"), array(mesh, (8, 64), "data", dtype=jnp.int32)
    return jax.jit(step, donate_argnums=0), (params, x, labels)


def mistake(mesh):
    return program(mesh, P("data"))


def clean(mesh):
    return program(mesh, P("data", None, "model"))
