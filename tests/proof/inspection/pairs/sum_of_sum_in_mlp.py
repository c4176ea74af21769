"""A row-parallel layer that is summed, and its caller that sums it again."""

import jax
from jax import P
from planted import array

KIND, FINDS, MESH = "wrong", "reduced-twice", {"dp": 2, "tp": 4}


def layer(w_in, w_out, x):
    return jax.lax.psum(jax.nn.gelu(x @ w_in) @ w_out, "tp")


def program(mesh, finish):
    def body(w_in, w_out, x):
        return finish(x + layer(w_in, w_out, x))

    specs = (P(None, "tp"), P("tp", None), P("dp", None))
    mapped = jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=P("dp", None), check_vma=False)
    return jax.jit(mapped), (
        array(mesh, (64, 128), None, "tp"),
        array(mesh, (128, 64), "tp"),
        array(mesh, (32, 64), "dp"),
    )


def mistake(mesh):
    return program(mesh, lambda y: jax.lax.psum(y, "tp"))


def clean(mesh):
    return program(mesh, lambda y: y)
