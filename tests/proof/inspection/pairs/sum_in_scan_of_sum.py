"""In a scan over layers each layer sums what the layer before has summed, instead of its own parts."""

import jax
import jax.numpy as jnp
from jax import P
from planted import array

KIND, FINDS, MESH = "wrong", "reduced-twice", {"dp": 2, "tp": 4}


def program(mesh, where):
    def body(ws, x):
        def layer(x, w):
            if where == "outside":
                return jax.lax.psum(jnp.tanh(x @ w), "tp"), None
            index = jax.lax.axis_index("tp")
            part = jax.lax.dynamic_slice_in_dim(x, 16 * index, 16, axis=1)
            rows = jax.lax.dynamic_slice_in_dim(w, 16 * index, 16, axis=0)
            return jnp.tanh(jax.lax.psum(part @ rows, "tp")), None

        return jax.lax.scan(layer, x, ws)[0]

    mapped = jax.shard_map(body, mesh=mesh, in_specs=(P(), P("dp")), out_specs=P("dp"), check_vma=False)
    return jax.jit(mapped), (array(mesh, (4, 64, 64)), array(mesh, (32, 64), "dp"))


def mistake(mesh):
    return program(mesh, "outside")


def clean(mesh):
    return program(mesh, "inside")
