"""The output matrix is split along the dim that the product sums over: logits are all-reduced."""

import jax
import jax.numpy as jnp
from planted import array

KIND, FINDS, MESH = "movement", "split-contraction", {"dp": 2, "tp": 4}


def program(mesh, spec):
    def loss(head, x, labels):
        logits = x @ head
        chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], axis=-1)
        return -chosen.mean()

    return jax.jit(loss), (
        array(mesh, (64, 512), *spec),
        array(mesh, (256, 64), "dp"),
        array(mesh, (256,), "dp", dtype=jnp.int32),
    )


def mistake(mesh):
    return program(mesh, ("tp", None))


def clean(mesh):
    return program(mesh, (None, "tp"))
