"""A row-parallel product that nothing sums before the nonlinearity."""

import jax
from jax import P
from planted import array

KIND, FINDS, MESH = "wrong", "missing-sum", {"dp": 2, "tp": 4}


def program(mesh, add):
    def body(w_in, w_out, x):
        y = jax.nn.relu(x @ w_in) @ w_out
        return jax.nn.softmax(add(y))

    specs = (P(None, "tp"), P("tp", None), P("dp", None))
    mapped = jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=P("dp", None), check_vma=False)
    return jax.jit(mapped), (
        array(mesh, (64, 128), None, "tp"),
        array(mesh, (128, 64), "tp"),
        array(mesh, (32, 64), "dp"),
    )


def mistake(mesh):
    return program(mesh, lambda y: y)


def clean(mesh):
    return program(mesh, lambda y: jax.lax.psum(y, "tp"))
