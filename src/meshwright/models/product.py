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

from meshwright.models.quantised import FORMATS, UNROUNDED, Formats, Pair, multiply
from meshwright.parallel import cotangent_spec
from meshwright.workload import MatmulDtype


def product(
    subscripts: str,
    x: Array,
    weight: Array,
    *,
    dtype: Any = None,
    out_sharding: P | None = None,
    matmul_dtype: MatmulDtype | None = None,
) -> Array:
    """`jnp.einsum` of x and a weight, which share no batch dim; the result in `dtype`, or that of the operands.

    Backward the cotangent is narrowed to the dtype of the operands before it is multiplied. matmul_dtype: to what
    operands are rounded, as `quantised` has it.
    """
    formats = FORMATS[matmul_dtype] if matmul_dtype else UNROUNDED
    return _product(subscripts, dtype or jnp.result_type(x, weight), out_sharding, formats, x, weight)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2, 3))
def _product(subscripts: str, dtype: Any, out_sharding: P | None, formats: Formats, x: Array, weight: Array) -> Array:
    return _einsum(subscripts, x, weight, formats.forward, dtype, out_sharding)


def _forward(
    subscripts: str, dtype: Any, out_sharding: P | None, formats: Formats, x: Array, weight: Array
) -> tuple[Array, tuple[Array, Array]]:
    return _product(subscripts, dtype, out_sharding, formats, x, weight), (x, weight)


def _backward(
    subscripts: str, dtype: Any, out_sharding: P | None, formats: Formats, kept: tuple[Array, Array], cotangent: Array
) -> tuple[Array, Array]:
    x, weight = kept
    operands, result = subscripts.split("->")
    of_x, of_weight = operands.split(",")
    narrow = cotangent.astype(x.dtype)
    return (
        _einsum(f"{result},{of_weight}->{of_x}", narrow, weight, formats.of_x, x.dtype, cotangent_spec(x)),
        _einsum(f"{of_x},{result}->{of_weight}", x, narrow, formats.of_weight, weight.dtype, cotangent_spec(weight)),
    )


_product.defvjp(_forward, _backward)


def _einsum(
    subscripts: str, left: Array, right: Array, formats: Pair | None, dtype: Any, out_sharding: P | None
) -> Array:
    """The einsum in `dtype`, of operands as they are or rounded to their formats."""
    if formats is None:
        return jnp.einsum(subscripts, left, right, preferred_element_type=dtype, out_sharding=out_sharding)
    return multiply(subscripts, left, right, formats, dtype=dtype, out_sharding=out_sharding)
