"""A tied embedding split along its width makes each device sum logits over the vocabulary."""

import jax
import jax.numpy as jnp
from planted import array

KIND, FINDS, MESH = "movement", "split-contraction", {"dp": 2, "tp": 4}


def program(mesh, spec):
    def loss(table, x, labels):
        logits = jnp.einsum("bsd,vd->bsv", jnp.tanh(x), table)
        one_hot = jax.nn.one_hot(labels, 512)
        return -(jax.nn.log_softmax(logits) * one_hot).mean()

    x, labels = array(mesh, (8, 32, 64), "dp"), array(mesh, (8, 32), "dp", dtype=jnp.int32)
    return jax.jit(loss), (array(mesh, (512, 64), *spec), x, labels)


def mistake(mesh):
    return program(mesh, (None, "tp"))


def clean(mesh):
    return program(mesh, ("tp", None))
