"""The function closes over the training set, of which a step takes the examples with some numbers."""

import jax
import jax.numpy as jnp
import numpy as np
from planted import array

KIND, FINDS, MESH = "waste", "captured-constant", {"data": 8}
EXAMPLES = np.random.default_rng(0).standard_normal((4096, 128), dtype=np.float32)


def step(w, numbers, examples):
    x = examples[numbers]
    return w - 0.1 * jax.grad(lambda w: jnp.square(x @ w).mean())(w)


def mistake(mesh):
    def captured(w, numbers):
        return step(w, numbers, jnp.asarray(EXAMPLES))

    args = array(mesh, (128, 64)), array(mesh, (64,), "data", dtype=jnp.int32)
    return jax.jit(captured, donate_argnums=0), args


def clean(mesh):
    args = array(mesh, (128, 64)), array(mesh, (64,), "data", dtype=jnp.int32), array(mesh, (4096, 128))
    return jax.jit(step, donate_argnums=0), args
