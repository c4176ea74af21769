"""A product with a weight, and the two products of its backward pass, written so that compilers make them as they are.

JAX's own rule multiplies the cotangent first and transposes the result. XLA:CPU makes a copy of the cotangent of that,
the larger operand, and leaves the faster of its two kernels (JAX 0.10.2); and a float32 result of narrower operands,
as logits are, would have both products multiply in float32.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec as P

from meshwright.models.quantised import FORMATS, UNROUNDED, Formats, Pair, multiply
from meshwright.runtime import ShardingContext, cotangent_spec
from meshwright.step import MatmulDtype


def product(
    subscripts: str,
    x: Array,
    weight: Array,
    *,
    dtype: Any = None,
    out_sharding: P | None = None,
    matmul_dtype: MatmulDtype | None = None,
    layout: ShardingContext | None = None,
) -> Array:
    """`jnp.einsum` of x and a weight, which share no batch dim; the result in `dtype`, or that of the operands.

    Backward the cotangent is narrowed to the dtype of the operands before it is multiplied. matmul_dtype: to what
    operands are rounded, as `quantised` has it; layout: of the layer that such a product stands in.
    """
    formats = FORMATS[matmul_dtype] if matmul_dtype else UNROUNDED
    kind = _Kind(subscripts, dtype or jnp.result_type(x, weight), out_sharding, formats, layout)
    return _product(kind, x, weight)


class _Kind(NamedTuple):
    """What a product is beside its operands."""

    subscripts: str
    dtype: Any
    out_sharding: P | None
    formats: Formats
    layout: ShardingContext | None


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _product(kind: _Kind, x: Array, weight: Array) -> Array:
    return _einsum(kind, kind.formats.forward, x, weight)


def _forward(kind: _Kind, x: Array, weight: Array) -> tuple[Array, tuple[Array, Array]]:
    return _product(kind, x, weight), (x, weight)


def _backward(kind: _Kind, kept: tuple[Array, Array], cotangent: Array) -> tuple[Array, Array]:
    x, weight = kept
    operands, result = kind.subscripts.split("->")
    of_x, of_weight = operands.split(",")
    narrow = cotangent.astype(x.dtype)
    x_kind = kind._replace(subscripts=f"{result},{of_weight}->{of_x}", dtype=x.dtype, out_sharding=cotangent_spec(x))
    weight_kind = kind._replace(
        subscripts=f"{of_x},{result}->{of_weight}", dtype=weight.dtype, out_sharding=cotangent_spec(weight)
    )
    return (
        _einsum(x_kind, kind.formats.of_x, narrow, weight),
        _einsum(weight_kind, kind.formats.of_weight, x, narrow),
    )


_product.defvjp(_forward, _backward)


def _einsum(kind: _Kind, formats: Pair | None, left: Array, right: Array) -> Array:
    """The einsum of operands as they are, or rounded to their formats."""
    letters, dtype, out = kind.subscripts, kind.dtype, kind.out_sharding
    if formats is None:
        return jnp.einsum(letters, left, right, preferred_element_type=dtype, out_sharding=out)
    return multiply(letters, left, right, formats, dtype=dtype, layout=kind.layout, out_sharding=out)
