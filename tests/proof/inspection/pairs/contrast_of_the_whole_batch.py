"""A contrastive loss gathers what its rows are compared with, but with a constraint too many the batch before."""

import jax
import jax.numpy as jnp
from jax import P
from jax.sharding import NamedSharding
from planted import array

KIND, FINDS, MESH = "movement", "unsharding-constraint", {"dp": 8}


def program(mesh, whole):
    def encode(weights, x):
        hidden = jax.nn.relu(x @ weights["in"])
        if whole:
            hidden = jax.lax.with_sharding_constraint(hidden, NamedSharding(mesh, P()))
        made = hidden @ weights["out"]
        return made / jnp.linalg.norm(made, axis=-1, keepdims=True)

    def loss(weights, images, texts):
        scores = 20.0 * encode(weights["image"], images) @ encode(weights["text"], texts["x"]).T
        scores -= jnp.log(texts["probability"])
        return -jnp.mean(jnp.diagonal(jax.nn.log_softmax(scores)))

    weights = {name: {"in": array(mesh, (128, 512)), "out": array(mesh, (512, 64))} for name in ("image", "text")}
    texts = {"x": array(mesh, (512, 128), "dp"), "probability": array(mesh, (512,), "dp")}
    return jax.jit(loss), (weights, array(mesh, (512, 128), "dp"), texts)


def mistake(mesh):
    return program(mesh, True)


def clean(mesh):
    return program(mesh, False)
