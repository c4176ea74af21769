"""A tensor parallel attention whose residual is summed again; scores were divided by as many as there are devices."""

import jax
import jax.numpy as jnp
from jax import P
from planted import array

KIND, FINDS, MESH = "wrong", "reduced-twice", {"dp": 2, "tp": 4}


def program(mesh, twice):
    def block(x, qkv, out):
        q, k, v = jnp.einsum("bsd,dchk->cbshk", x, qkv)
        weights = jax.nn.softmax(jnp.einsum("bqhk,bshk->bhqs", q, k) / 4.0)
        y = x + jax.lax.psum(jnp.einsum("bhqs,bshk,hkd->bqd", weights, v, out), "tp")
        return jax.lax.psum(y, "tp") if twice else y

    specs = (P("dp"), P(None, None, "tp"), P("tp"))
    mapped = jax.shard_map(block, mesh=mesh, in_specs=specs, out_specs=P("dp"), check_vma=False)
    shapes = ((8, 32, 64), (64, 3, 8, 16), (8, 16, 64))
    return jax.jit(mapped), tuple(array(mesh, shape, *spec) for shape, spec in zip(shapes, specs, strict=True))


def mistake(mesh):
    return program(mesh, True)


def clean(mesh):
    return program(mesh, False)
