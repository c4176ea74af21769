"""A product with a weight, and the two products of its backward pass, written so that compilers make them as they are.

JAX's own rule multiplies the cotangent first and transposes the result. XLA:CPU makes a copy of the cotangent of that,
the larger operand, and leaves the faster of its two kernels (JAX 0.10.2); and a float32 result of narrower operands,
as logits are, would have both products multiply in float32.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec as P

from meshwright.parallel import cotangent_spec


def product(subscripts: str, x: Array, weight: Array, *, dtype: Any = None, out_sharding: P | None = None) -> Array:
    """`jnp.einsum` of x and a weight, which share no batch dim; the result in `dtype`, or that of the operands.

    Backward the cotangent is narrowed to the dtype of the operands before it is multiplied.
    """
    return _product(subscripts, dtype, out_sharding, x, weight)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _product(subscripts: str, dtype: Any, out_sharding: P | None, x: Array, weight: Array) -> Array:
    return jnp.einsum(subscripts, x, weight, preferred_element_type=dtype, out_sharding=out_sharding)


def _forward(
    subscripts: str, dtype: Any, out_sharding: P | None, x: Array, weight: Array
) -> tuple[Array, tuple[Array, Array]]:
    return _product(subscripts, dtype, out_sharding, x, weight), (x, weight)


def _backward(
    subscripts: str, dtype: Any, out_sharding: P | None, kept: tuple[Array, Array], cotangent: Array
) -> tuple[Array, Array]:
    x, weight = kept
    operands, result = subscripts.split("->")
    of_x, of_weight = operands.split(",")
    narrow = cotangent.astype(x.dtype)
    return (
        jnp.einsum(f"{result},{of_weight}->{of_x}", narrow, weight, out_sharding=cotangent_spec(x)),
        jnp.einsum(f"{of_x},{result}->{of_weight}", x, narrow, out_sharding=cotangent_spec(weight)),
    )


_product.defvjp(_forward, _backward)
