"""Tensor parallel layers differentiated inside of shard_map: each psum is summed again on the way back."""

import jax
import jax.numpy as jnp
from jax import P
from planted import array

KIND, FINDS, MESH = "wrong", "reduced-twice", {"dp": 2, "tp": 4}


def program(mesh, checked):
    def step(w_in, w_out, x):
        def loss(w_in, w_out):
            y = jax.lax.psum(jnp.tanh(x @ w_in) @ w_out, "tp")
            return jnp.square(y).sum()

        gradients = jax.grad(loss, (0, 1))(w_in, w_out)
        gradients = gradients if checked else jax.lax.psum(gradients, "dp")
        return jax.tree.map(lambda w, g: w - 0.1 * g, (w_in, w_out), gradients)

    specs = (P(None, "tp"), P("tp", None))
    mapped = jax.shard_map(step, mesh=mesh, in_specs=(*specs, P("dp")), out_specs=specs, check_vma=checked)
    args = (array(mesh, (64, 128), None, "tp"), array(mesh, (128, 64), "tp"), array(mesh, (32, 64), "dp"))
    return jax.jit(mapped, donate_argnums=(0, 1)), args


def mistake(mesh):
    return program(mesh, False)


def clean(mesh):
    return program(mesh, True)
