"""Each device adds noise of its own to weights that are declared the same on all."""

import jax
import jax.numpy as jnp
from jax import P
from planted import array

KIND, FINDS, MESH = "wrong", "missing-sum", {"dp": 8}


def program(mesh, own):
    def body(w, seed):
        key = jax.random.key(seed[0])
        if own:
            key = jax.random.fold_in(key, jax.lax.axis_index("dp"))
        return w + 0.1 * jax.random.normal(key, w.shape)

    mapped = jax.shard_map(body, mesh=mesh, in_specs=(P(), P()), out_specs=P(), check_vma=False)
    return jax.jit(mapped), (array(mesh, (64, 64)), array(mesh, (1,), dtype=jnp.int32))


def mistake(mesh):
    return program(mesh, True)


def clean(mesh):
    return program(mesh, False)
