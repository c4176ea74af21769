"""Grouped matmuls of experts on one device, optionally with operands quantized to 8 bits (see `quantised`).

Each row has one scale, and so has each column of each expert's weight. For weight gradients, fp8 quantizes rows and
cotangents with a scale per column; int8 does not quantize that matmul.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from meshwright.description.step.strategy import MatmulDtype
from meshwright.execution.models.quantised.products import FORMATS, UNROUNDED, Formats, Pair, quantisation
from meshwright.execution.models.quantised.scaled import ScaledWeight
from meshwright.execution.models.quantised.scaled_products import scaled_expert_product
from meshwright.execution.runtime.experts.products import expert_of_rows, grouped_matmul, grouped_matmul_transposed
from meshwright.execution.runtime.shards import match_varying


def expert_product(
    rows: Array, weights: Array | ScaledWeight, sizes: Array | None, matmul_dtype: MatmulDtype | None = None
) -> Array:
    """Return `grouped_matmul` of rows with their experts' weights, in the rows' dtype, with an explicit backward.

    A `ScaledWeight` has no backward.

    sizes: the number of rows of each expert [e]; None if rows are [e, slots, d]. matmul_dtype: dtype to which operands
    are quantized; None for no quantization.
    """
    if isinstance(weights, ScaledWeight):
        return scaled_expert_product(rows, weights, sizes)
    rows, weights = match_varying(rows, weights)
    return _expert_product(FORMATS[matmul_dtype] if matmul_dtype else UNROUNDED, rows, weights, sizes)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _expert_product(formats: Formats, rows: Array, weights: Array, sizes: Array | None) -> Array:
    return _product(rows, weights, sizes, formats.forward)


def _forward(formats: Formats, rows: Array, weights: Array, sizes: Array | None) -> tuple[Array, tuple[Any, ...]]:
    return _expert_product(formats, rows, weights, sizes), (rows, weights, sizes)


def _backward(formats: Formats, kept: tuple[Any, ...], cotangent: Array) -> tuple[Array, Array, None]:
    rows, weights, sizes = kept
    row_gradient = _product(cotangent, jnp.swapaxes(weights, 1, 2), sizes, formats.of_x)
    weight_gradient = _over_rows(rows, cotangent, sizes, formats.of_weight, weights.dtype)
    return row_gradient, weight_gradient, None


_expert_product.defvjp(_forward, _backward)


def _product(rows: Array, weights: Array, sizes: Array | None, formats: Pair | None) -> Array:
    """Multiply each row by the weight of its expert; `formats` are the dtypes to which both are quantized, if any."""
    if formats is None:
        return grouped_matmul(rows, weights, sizes, rows.dtype)
    left, right = _rounded(rows, formats[0], rows.ndim - 1), _rounded(weights, formats[1], 1)
    product, scale = grouped_matmul(left.qvalue, right.qvalue, sizes, _sum_dtype(left)), right.scale
    if sizes is not None:
        scale = scale[:, 0].at[expert_of_rows(rows.shape[0], sizes)].get(mode="clip")
    return (product.astype(jnp.float32) * left.scale * scale).astype(rows.dtype)


def _over_rows(rows: Array, cotangent: Array, sizes: Array | None, formats: Pair | None, dtype: Any) -> Array:
    """Return the gradients of all experts' weights, in `dtype`, from rows and cotangents, quantized to `formats`."""
    if formats is None:
        return grouped_matmul_transposed(rows, cotangent, sizes, dtype)
    arrays = (rows, cotangent)
    if sizes is not None:
        # Rows beyond `sum(sizes)` are undefined and must not affect the scales.
        is_row = (jnp.arange(rows.shape[0]) < jnp.sum(sizes))[:, None]
        arrays = (jnp.where(is_row, array, 0) for array in arrays)
    left, right = (_rounded(array, dtype, rows.ndim - 2) for array, dtype in zip(arrays, formats, strict=True))
    product = grouped_matmul_transposed(left.qvalue, right.qvalue, sizes, _sum_dtype(left))
    by_row = lax.broadcast_to_rank(jnp.swapaxes(left.scale, -1, -2), 3)
    by_column = lax.broadcast_to_rank(right.scale, 3)
    return (product.astype(jnp.float32) * by_row * by_column).astype(dtype)


def _rounded(array: Array, dtype: Any, summed: int) -> Any:
    """Quantize an array, with a scale for each slice along the dim `summed`, which the matmul sums over."""
    kept = [dim for dim in range(array.ndim) if dim != summed]
    return quantisation().quantize(array.astype(jnp.float32), dtype, channelwise_axes=kept)


def _sum_dtype(rounded: Any) -> Any:
    """Return the dtype in which matmuls of a quantized array accumulate."""
    return jnp.int32 if rounded.qvalue.dtype == jnp.int8 else jnp.float32
