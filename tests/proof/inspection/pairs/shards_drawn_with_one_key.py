"""Parts of initial weights are drawn in shard_map, each with the same key, so that all parts are equal."""

import jax
from jax import P

KIND, FINDS, MESH = "wrong", "same-random-bits", {"tp": 8}


def program(mesh, folded):
    def body(key):
        use = jax.random.fold_in(key, jax.lax.axis_index("tp")) if folded else key
        up, down = jax.random.split(use)
        # A weight that all devices hold is drawn with the key that all have.
        shift = jax.random.normal(key, (128,))
        return {
            "up": jax.random.normal(up, (128, 64)) / 11,
            "down": jax.random.truncated_normal(down, -2, 2, (64, 128)) / 23,
            "shift": shift,
        }

    specs = {"up": P(None, "tp"), "down": P("tp"), "shift": P()}
    mapped = jax.shard_map(body, mesh=mesh, in_specs=P(), out_specs=specs, check_vma=False)
    return jax.jit(mapped), (jax.random.key(0),)


def mistake(mesh):
    return program(mesh, False)


def clean(mesh):
    return program(mesh, True)
