"""A matmul with a weight, with an explicit backward of two matmuls.

JAX's own backward puts the cotangent first and transposes the result, so that XLA:CPU copies the cotangent, the larger
operand, and uses the slower of its two kernels (JAX 0.10.2). For a float32 result of narrower operands, such as logits,
both matmuls of JAX's backward are in float32; here they are in the dtype of the operands.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec as P

from meshwright.description.step.strategy import MatmulDtype
from meshwright.execution.models.quantised.products import FORMATS, UNROUNDED, Formats, Pair, multiply
from meshwright.execution.runtime.sharding_context import ShardingContext, cotangent_spec


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
    """Return `jnp.einsum(subscripts, x, weight)`; x and the weight share no batch dim.

    Args:
        dtype: dtype of the result; default: that of the operands, to which backward casts the cotangent.
        out_sharding: as in `jnp.einsum`.
        matmul_dtype: dtype to which operands are quantized (see `quantised`); None for no quantization.
        layout: sharding context of the layer, for quantized matmuls.
    """
    formats = FORMATS[matmul_dtype] if matmul_dtype else UNROUNDED
    einsum = _Einsum(subscripts, dtype or jnp.result_type(x, weight), out_sharding, formats, layout)
    return _product(einsum, x, weight)


class _Einsum(NamedTuple):
    """The parameters of a matmul, without its operands."""

    subscripts: str
    dtype: Any
    out_sharding: P | None
    formats: Formats
    layout: ShardingContext | None


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _product(einsum: _Einsum, x: Array, weight: Array) -> Array:
    return _multiply(einsum, einsum.formats.forward, x, weight)


def _forward(einsum: _Einsum, x: Array, weight: Array) -> tuple[Array, tuple[Array, Array]]:
    return _product(einsum, x, weight), (x, weight)


def _backward(einsum: _Einsum, kept: tuple[Array, Array], cotangent: Array) -> tuple[Array, Array]:
    x, weight = kept
    operands, result = einsum.subscripts.split("->")
    of_x, of_weight = operands.split(",")
    narrow = cotangent.astype(x.dtype)
    x_einsum = einsum._replace(
        subscripts=f"{result},{of_weight}->{of_x}", dtype=x.dtype, out_sharding=cotangent_spec(x)
    )
    weight_einsum = einsum._replace(
        subscripts=f"{of_x},{result}->{of_weight}", dtype=weight.dtype, out_sharding=cotangent_spec(weight)
    )
    return (
        _multiply(x_einsum, einsum.formats.of_x, narrow, weight),
        _multiply(weight_einsum, einsum.formats.of_weight, x, narrow),
    )


_product.defvjp(_forward, _backward)


def _multiply(einsum: _Einsum, formats: Pair | None, left: Array, right: Array) -> Array:
    """Compute the einsum, with operands quantized to the two dtypes in `formats`, if any."""
    letters, dtype, out = einsum.subscripts, einsum.dtype, einsum.out_sharding
    if formats is None:
        return jnp.einsum(letters, left, right, preferred_element_type=dtype, out_sharding=out)
    return multiply(letters, left, right, formats, dtype=dtype, layout=einsum.layout, out_sharding=out)
