"""The gradient is taken around a shard_map without check_vma: two blocks with residuals, one of them summed again."""

import jax
import jax.numpy as jnp
from jax import P
from planted import array

KIND, FINDS, MESH = "wrong", "reduced-twice", {"dp": 2, "tp": 4}


def program(mesh, again):
    def mlp(weights, x):
        return jax.lax.psum(jax.nn.gelu(x @ weights["up"]) @ weights["down"], "tp")

    def blocks(weights, x):
        x = x + mlp(weights[0], x)
        made = mlp(weights[1], x)
        return x + (jax.lax.psum(made, "tp") if again else made)

    specs = [{"up": P(None, "tp"), "down": P("tp")}] * 2
    mapped = jax.shard_map(blocks, mesh=mesh, in_specs=(specs, P("dp")), out_specs=P("dp"), check_vma=False)

    def step(weights, x, y):
        gradients = jax.grad(lambda weights: jnp.mean((mapped(weights, x) - y) ** 2))(weights)
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients)

    weights = [{"up": array(mesh, (64, 256), None, "tp"), "down": array(mesh, (256, 64), "tp")} for _ in range(2)]
    rows = array(mesh, (128, 64), "dp")
    return jax.jit(step, donate_argnums=0), (weights, rows, rows)


def mistake(mesh):
    return program(mesh, True)


def clean(mesh):
    return program(mesh, False)
