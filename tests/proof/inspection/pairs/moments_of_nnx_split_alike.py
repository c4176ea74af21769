"""Two kernels of one shape, in Flax NNX, are split along different dims, and their moments as they are, or not."""

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax import P
from jax.sharding import NamedSharding

KIND, FINDS, MESH = "state", "replicated-states", {"tp": 8}
SPECS = {"up": P(None, "tp"), "down": P("tp", None)}


class Mlp(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(256, 256, use_bias=False, rngs=rngs)
        self.down = nnx.Linear(256, 256, use_bias=False, rngs=rngs)

    def __call__(self, x):
        return self.down(nnx.relu(self.up(x)))


def step(model, optimizer, x, y):
    def loss(model):
        return jnp.mean((model(x) - y) ** 2)

    value, gradients = nnx.value_and_grad(loss)(model)
    optimizer.update(model, gradients)
    return value


def program(mesh, shards):
    model = Mlp(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)

    def put(thing, is_split):
        def one(path, value):
            name = next((key for key in SPECS if key in jax.tree_util.keystr(path)), None)
            spec = SPECS[name] if name and is_split else P()
            return jax.device_put(value, NamedSharding(mesh, spec))

        nnx.update(thing, jax.tree_util.tree_map_with_path(one, nnx.state(thing)))

    put(model, True)
    put(optimizer, shards)
    x = jax.device_put(jnp.ones((64, 256)), NamedSharding(mesh, P()))
    return nnx.jit(step, donate_argnums=(0, 1)), (model, optimizer, x, x)


def mistake(mesh):
    return program(mesh, False)


def clean(mesh):
    return program(mesh, True)
