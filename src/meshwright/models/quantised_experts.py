"""Products of experts with operands in 8 bits, on one device: rounded as `quantised` says, each expert by itself.

A row has a scale of its own, and so has each column of each expert's weight. For the gradient of a weight fp8 rounds
rows and cotangents, with a scale for each of their columns.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from meshwright.models.quantised import FORMATS, Formats, Pair, quantisation
from meshwright.parallel.experts import multiply
from meshwright.workload import MatmulDtype

_OF_WEIGHTS = lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((0,), (0,)), ((), ())), lhs_ragged_dimensions=[0], rhs_group_dimensions=[]
)
"""[m, d] and [m, f] summed over the rows of each expert, [experts, d, f]."""


def multiply_rounded(rows: Array, weights: Array, sizes: Array | None, matmul_dtype: MatmulDtype | None) -> Array:
    """`parallel.experts.multiply` in a `shard_map`, of operands that are rounded where a dtype is said."""
    if matmul_dtype is None:
        return multiply(rows, weights, sizes)
    # The sum of what devices with other rows make of a gradient is the transpose of this.
    others = tuple(jax.typeof(rows).manual_axis_type.varying - jax.typeof(weights).manual_axis_type.varying)
    weights = lax.pcast(weights, others, to="varying") if others else weights
    return _multiply(FORMATS[matmul_dtype], rows, weights, sizes)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _multiply(formats: Formats, rows: Array, weights: Array, sizes: Array | None) -> Array:
    return _product(rows, weights, sizes, formats.forward)


def _forward(formats: Formats, rows: Array, weights: Array, sizes: Array | None) -> tuple[Array, tuple[Any, ...]]:
    return _multiply(formats, rows, weights, sizes), (rows, weights, sizes)


def _backward(formats: Formats, kept: tuple[Any, ...], cotangent: Array) -> tuple[Array, Array, None]:
    rows, weights, sizes = kept
    of_rows = _product(cotangent, jnp.swapaxes(weights, 1, 2), sizes, formats.of_x)
    if formats.of_weight is None:
        _, pull = jax.vjp(lambda weights: multiply(rows, weights, sizes), weights)
        return of_rows, pull(cotangent)[0], None
    return of_rows, _of_weights(rows, cotangent, sizes, formats.of_weight).astype(weights.dtype), None


_multiply.defvjp(_forward, _backward)


def _product(rows: Array, weights: Array, sizes: Array | None, formats: Pair | None) -> Array:
    """Each row times the weights of its expert, both rounded."""
    if formats is None:
        return multiply(rows, weights, sizes)
    left, right = _rounded(rows, formats[0], rows.ndim - 1), _rounded(weights, formats[1], 1)
    if sizes is None:
        product = jnp.einsum("esd,edf->esf", left.qvalue, right.qvalue, preferred_element_type=_sums(left))
        return (product * left.scale * right.scale).astype(rows.dtype)
    product = lax.ragged_dot(left.qvalue, right.qvalue, sizes, preferred_element_type=_sums(left))
    expert = jnp.searchsorted(jnp.cumsum(sizes), jnp.arange(rows.shape[0]), side="right")
    return (product * left.scale * right.scale[:, 0].at[expert].get(mode="clip")).astype(rows.dtype)


def _of_weights(rows: Array, cotangent: Array, sizes: Array | None, formats: Pair) -> Array:
    """The gradients of the weights of all experts, of rows and cotangents that are rounded."""
    if sizes is None:
        left, right = _rounded(rows, formats[0], 1), _rounded(cotangent, formats[1], 1)
        product = jnp.einsum("esd,esf->edf", left.qvalue, right.qvalue, preferred_element_type=_sums(left))
        return product * jnp.swapaxes(left.scale, 1, 2) * right.scale
    # Rows beyond those of all experts are undefined, and would have a say in the scales.
    is_row = (jnp.arange(rows.shape[0]) < jnp.sum(sizes))[:, None]
    left, right = (
        _rounded(jnp.where(is_row, array, 0), dtype, 0) for array, dtype in zip((rows, cotangent), formats, strict=True)
    )
    product = lax.ragged_dot_general(left.qvalue, right.qvalue, sizes, _OF_WEIGHTS, preferred_element_type=_sums(left))
    return product * left.scale.T * right.scale


def _rounded(array: Array, dtype: Any, summed: int) -> Any:
    """An array rounded to a format, with a scale for each slice along the dim that a product sums over."""
    kept = [dim for dim in range(array.ndim) if dim != summed]
    return quantisation().quantize(array.astype(jnp.float32), dtype, channelwise_axes=kept)


def _sums(rounded: Any) -> Any:
    """What products of a rounded array are summed in."""
    return jnp.int32 if rounded.qvalue.dtype == jnp.int8 else jnp.float32
