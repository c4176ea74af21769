"""Weights of a server in int8, int4 or fp8 with scales (`step.weight_formats`): how they are stored and converted.

Each device has its part of a weight as matrices, whose inputs are cut into groups. `scaled_products` multiplies them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import Array
from jax.sharding import PartitionSpec as P

from meshwright.description.step.layer import Dims
from meshwright.description.step.model import ModelConfig
from meshwright.description.step.padding import padded
from meshwright.description.step.parameter_tree import Parameter, parameters
from meshwright.description.step.serving import SERVING_RULES
from meshwright.description.step.trained import summed_dims
from meshwright.description.step.weight_formats import (
    WEIGHT_FORMATS,
    MatrixShape,
    WeightFormat,
    has_format,
    matrix_shape,
)
from meshwright.execution.runtime.sharding_context import ShardingContext
from meshwright.execution.runtime.shards import on_shards

VALUES: Mapping[str, Any] = {"int8": np.int8, "int4": np.int8, "fp8": ml_dtypes.float8_e4m3fn}
"""The dtype of a format's values; those of int4 are packed afterwards."""

SCALES: Mapping[str, Any] = {"int8": np.float32, "int4": ml_dtypes.bfloat16, "fp8": np.float32}
"""The dtype of the scales of weights that are quantised here; those of a checkpoint keep theirs."""


@partial(jax.tree_util.register_dataclass, data_fields=("values", "scale", "zero"), meta_fields=("inputs", "outputs"))
@dataclass(frozen=True)
class ScaledWeight:
    """A weight as matrices on each device: layers, experts, groups and inputs of a group, columns.

    On each device, dims of inputs and those of outputs are merged in C order. The global arrays are the matrices of all
    devices, in the order of the mesh axes that split the weight's dims.

    Args:
        values: int8, int4 or fp8 [layers, (experts,) groups, group, columns]; or uint8 with half of `group`, where each
            byte has a 4-bit value of the group's first half in its low bits, and one of its second half in the others.
        scale: the factor of each group of a column [layers, (experts,) groups, 1, columns].
        zero: number subtracted from values before they are scaled, shaped like `scale`, in int8; None for 0.
        inputs, outputs: logical axis and size of each dim of the weight that its matmul sums over, and of the others.
    """

    values: Any
    scale: Any
    zero: Any
    inputs: Dims
    outputs: Dims


def is_scaled(leaf: Any) -> bool:
    """Whether a leaf of a parameter tree is a `ScaledWeight`."""
    return isinstance(leaf, ScaledWeight)


def in_format(
    params: Mapping[str, Any],
    model: ModelConfig,
    layout: ShardingContext,
    dtype: str,
    form: WeightFormat | None = None,
) -> Any:
    """Return a server's parameters, concrete or abstract, with the weights of layers in a format.

    Each device quantises its own part. Weights that already are in the format are not changed.

    form: the format, for abstract parameters of a checkpoint with other groups or with zero points; default: that of
    `dtype`.

    Raises:
        MeshwrightError: as in `matrix_shape`.
    """

    def convert(path: str, parameter: Parameter, stored: Any) -> Any:
        if not has_format(parameter) or is_scaled(stored):
            return stored
        used = form or WEIGHT_FORMATS[dtype]
        shape = matrix_shape(parameter, used, mesh=layout.mesh, rules=layout.rules, what=path)
        whole, matrices = layout.spec(*parameter.axes), matrix_spec(parameter, layout)

        def local(weight: Array) -> tuple[Array, Array]:
            matrix = weight.astype(jnp.float32).reshape(_matrices(weight.shape, parameter, shape))
            return quantise(matrix, dtype)

        own = jax.jit(jax.shard_map(local, in_specs=whole, out_specs=(matrices, matrices)))
        is_abstract = isinstance(stored, jax.ShapeDtypeStruct)
        values, scale = jax.eval_shape(own, stored) if is_abstract else jax.block_until_ready(own(stored))
        zero = scale.update(dtype=np.int8) if is_abstract and used.zero_bytes else None
        return scaled_weight(values, scale, zero, parameter)

    declared: Any = parameters(padded(model, layout.mesh, SERVING_RULES))
    return {
        name: {key: convert(f"{name}.{key}", declared[name][key], leaf) for key, leaf in stored.items()}
        if isinstance(stored, Mapping)
        else stored
        for name, stored in params.items()
    }


def scaled_weight(values: Any, scale: Any, zero: Any, parameter: Parameter) -> ScaledWeight:
    """Return a weight from its arrays and its declaration, padded as the mesh has it."""
    dims, (*_, last) = tuple(zip(parameter.axes, parameter.shape, strict=True)), summed_dims(parameter)
    return ScaledWeight(values, scale, zero, dims[summed_dims(parameter)[0] : last + 1], dims[last + 1 :])


def matrix_spec(parameter: Parameter, layout: ShardingContext) -> P:
    """Return the spec of the arrays of a `ScaledWeight`."""
    first, *_ = inner = summed_dims(parameter)

    def merged(names: tuple[str, ...]) -> tuple[str, ...] | None:
        return tuple(axis for name in names for axis in layout.axes(name)) or None

    axes = parameter.axes
    return P(*layout.spec(*axes[:first]), merged(axes[first : inner[-1] + 1]), None, merged(axes[inner[-1] + 1 :]))


def _matrices(local: tuple[int, ...], parameter: Parameter, shape: MatrixShape) -> tuple[int, ...]:
    """Return the shape of one device's part of a weight as matrices, given that part's shape `local`."""
    return *local[: summed_dims(parameter)[0]], shape.num_groups, shape.group, shape.columns


def quantise(matrix: Any, dtype: str) -> tuple[Any, Any]:
    """Return the values and the scales of float32 matrices [..., groups, group, columns], in NumPy or in JAX."""
    xp: Any = np if isinstance(matrix, np.ndarray) else jnp
    largest = WEIGHT_FORMATS[dtype].largest
    scale = (xp.max(xp.abs(matrix), axis=-2, keepdims=True) / xp.float32(largest)).astype(SCALES[dtype])
    shares = matrix / xp.maximum(scale.astype(xp.float32), xp.float32(1e-30))
    values = xp.clip(shares if dtype == "fp8" else xp.round(shares), -largest, largest).astype(VALUES[dtype])
    return packed(values) if dtype == "int4" else values, scale


def integers(weight: ScaledWeight, dtype: Any) -> Array:
    """Return a weight's values less its zero points, unpacked, in `dtype`, which represents them exactly."""
    values = unpacked(weight.values).astype(dtype)
    return values if weight.zero is None else values - weight.zero.astype(dtype)


def packed(values: Any) -> Any:
    """Return 4-bit values [..., group, columns] in int8 as bytes [..., group / 2, columns], in NumPy or in JAX."""
    half = values.shape[-2] // 2
    low, high = (part.astype(np.uint8) & np.uint8(15) for part in (values[..., :half, :], values[..., half:, :]))
    return low | (high << np.uint8(4))


def unpacked(values: Array) -> Array:
    """Return the values of bytes, in int8; other values are unchanged."""
    if values.dtype != jnp.uint8:
        return values
    # Codes are in two's complement.
    halves = ((half.astype(jnp.int8) ^ jnp.int8(8)) - jnp.int8(8) for half in (values & 15, values >> 4))
    return jnp.concatenate(list(halves), axis=-2)


def in_int4(weight: ScaledWeight) -> ScaledWeight:
    """Return a weight whose bytes have two values with values in JAX's int4; others are unchanged.

    XLA:TPU reads int4 from HBM in 4 bits, and would write the values of bytes to memory. On CPUs programs compiled
    ahead of their call refuse arrays in int4 (JAX 0.10.2).
    """
    if weight.values.dtype != jnp.uint8:
        return weight
    stored = weight.values
    if isinstance(stored, jax.ShapeDtypeStruct):
        *first, half, columns = stored.shape
        values = jax.ShapeDtypeStruct((*first, 2 * half, columns), jnp.int4, sharding=stored.sharding)
        return replace(weight, values=values)
    spec = stored.sharding.spec
    convert = jax.jit(jax.shard_map(lambda own: unpacked(own).astype(jnp.int4), in_specs=spec, out_specs=spec))
    values = jax.block_until_ready(convert(stored))
    stored.delete()
    return replace(weight, values=values)


def dequantised(weight: ScaledWeight, dtype: Any) -> Array:
    """Return matrices [..., groups, group, columns] in `dtype`, computed in float32."""
    return (integers(weight, jnp.float32) * weight.scale.astype(jnp.float32)).astype(dtype)


def as_declared(weight: Any, layout: ShardingContext, dtype: Any) -> Any:
    """Return a weight [..., *inputs, *outputs] in `dtype`; one that is not a `ScaledWeight` is unchanged."""
    if not isinstance(weight, ScaledWeight):
        return weight
    names = tuple(name for name, _ in (*weight.inputs, *weight.outputs))
    sizes = local_sizes(weight.inputs, layout) + local_sizes(weight.outputs, layout)
    first = jax.typeof(weight.values).sharding.spec.partitions[:-3]

    def local(weight: ScaledWeight) -> Array:
        return dequantised(weight, dtype).reshape(*weight.values.shape[:-3], *sizes)

    out = P(*first, *layout.spec(*names).partitions)
    return on_shards(local, layout, in_specs=(specs(weight),), out_specs=out)(weight)


def specs(weight: Any) -> Any:
    """Return the specs of a weight's arrays, for `shard_map`: of one array, or of those of a `ScaledWeight`."""
    return jax.tree.map(lambda array: jax.typeof(array).sharding.spec, weight)


def local_sizes(dims: Dims, layout: ShardingContext) -> tuple[int, ...]:
    """Return the sizes of dims on one device."""
    return tuple(size // layout.mesh.degree(layout.axes(name)) for name, size in dims)
