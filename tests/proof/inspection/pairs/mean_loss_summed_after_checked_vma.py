"""check_vma=True has summed the gradients of a loss that is divided by the devices; a psum sums them once more."""

import jax
import jax.numpy as jnp
from jax import P
from planted import array

KIND, FINDS, MESH = "wrong", "reduced-twice", {"dp": 4, "tp": 2}


def program(mesh, again):
    def step(params, x):
        def loss(params):
            y = jax.lax.psum(jax.nn.relu(x @ params["a"]) @ params["b"], "tp")
            return jnp.square(y).mean() / 4

        gradients = jax.grad(loss)(params)
        if again:
            gradients = jax.lax.psum(gradients, "dp")
        return jax.tree.map(lambda w, g: w - 0.1 * g, params, gradients)

    specs = {"a": P(None, "tp"), "b": P("tp")}
    mapped = jax.shard_map(step, mesh=mesh, in_specs=(specs, P("dp")), out_specs=specs)
    params = {"a": array(mesh, (128, 256), None, "tp"), "b": array(mesh, (256, 128), "tp")}
    return jax.jit(mapped, donate_argnums=0), (params, array(mesh, (64, 128), "dp"))


def mistake(mesh):
    return program(mesh, True)


def clean(mesh):
    return program(mesh, False)
