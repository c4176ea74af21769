"""Each stage takes a branch of its own, and gathers over the stages inside, or over another axis."""

import jax
import jax.numpy as jnp
from jax import P
from planted import array

KIND, FINDS, MESH = "wrong", "branched-collective", {"pp": 2, "tp": 4}


def program(mesh, axis):
    def body(x):
        def first(x):
            return jax.lax.all_gather(x, axis, tiled=True)[:8] * 2

        def second(x):
            return jnp.tanh(x)

        return jax.lax.switch(jax.lax.axis_index("pp"), [first, second], x)

    mapped = jax.shard_map(body, mesh=mesh, in_specs=P(("pp", "tp")), out_specs=P(("pp", "tp")), check_vma=False)
    return jax.jit(mapped), (array(mesh, (64, 64), ("pp", "tp")),)


def mistake(mesh):
    return program(mesh, "pp")


def clean(mesh):
    return program(mesh, "tp")
