"""In shard_map the stack of layers is gathered before the scan, or each layer inside of it."""

import jax
import jax.numpy as jnp
from jax import P
from planted import array

KIND, FINDS, MESH = "movement", "hoisted-gather", {"fsdp": 8}


def program(mesh, inside):
    def body(ws, x):
        def gather(w, dim):
            return jax.lax.all_gather(w, "fsdp", axis=dim, tiled=True)

        def layer(x, w):
            return jnp.tanh(x @ (gather(w, 0) if inside else w)), None

        return jax.lax.scan(layer, x, ws if inside else gather(ws, 1))[0]

    specs = (P(None, "fsdp"), P("fsdp"))
    mapped = jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=P("fsdp"), check_vma=False)
    return jax.jit(mapped), (array(mesh, (6, 128, 128), None, "fsdp"), array(mesh, (64, 128), "fsdp"))


def mistake(mesh):
    return program(mesh, False)


def clean(mesh):
    return program(mesh, True)
