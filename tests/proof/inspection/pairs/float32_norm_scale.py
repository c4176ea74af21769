"""A norm's float32 scale makes the layer behind it float32."""

import jax
import jax.numpy as jnp
from planted import array

KIND, FINDS, MESH = "waste", "wide-product", {"dp": 8}


def program(mesh, cast):
    def layer(params, x):
        with jax.numpy_dtype_promotion("standard"):
            wide = x.astype(jnp.float32)
            y = (wide * jax.lax.rsqrt(jnp.square(wide).mean(-1, keepdims=True) + 1e-6)).astype(x.dtype)
            return jax.nn.relu(cast(y * params["scale"]) @ params["w"])

    params = {"scale": array(mesh, (1, 64)), "w": array(mesh, (64, 128), dtype=jnp.bfloat16)}
    return jax.jit(layer), (params, array(mesh, (64, 64), "dp", dtype=jnp.bfloat16))


def mistake(mesh):
    return program(mesh, lambda y: y)


def clean(mesh):
    return program(mesh, lambda y: y.astype(jnp.bfloat16))
