"""Weights are gathered over an axis that does not split them."""

import jax
from jax import P
from planted import array

KIND, FINDS, MESH = "wrong", "sent-copies", {"dp": 2, "tp": 4}


def program(mesh, spec):
    def body(w, x):
        whole = jax.lax.all_gather(w, "tp", axis=1, tiled=True)
        rows = jax.lax.dynamic_slice_in_dim(x, 4 * jax.lax.axis_index("tp"), 4)
        return jax.nn.relu(rows @ whole[:, :128])

    mapped = jax.shard_map(body, mesh=mesh, in_specs=(spec, P("dp")), out_specs=P(("dp", "tp")), check_vma=False)
    return jax.jit(mapped), (array(mesh, (64, 128), *spec), array(mesh, (32, 64), "dp"))


def mistake(mesh):
    return program(mesh, P())


def clean(mesh):
    return program(mesh, P(None, "tp"))
