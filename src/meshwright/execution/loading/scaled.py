"""Read the weights of layers in a format with scales, each device its own part.

Weights that a checkpoint has in the format keep their integers or fp8 values, scales and zero points; others are
quantised layer by layer, so that no unquantised copy of a parameter is in memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from meshwright.description.families.quantization import scattered_groups
from meshwright.description.step.model import ModelConfig
from meshwright.description.step.padding import padded
from meshwright.description.step.parameter_tree import Parameter, leaves, parameters
from meshwright.description.step.serving import SERVING_RULES
from meshwright.description.step.trained import summed_dims
from meshwright.description.step.weight_formats import WEIGHT_FORMATS, MatrixShape, has_format, matrix_shape
from meshwright.execution.models.quantised.scaled import ScaledWeight, matrix_spec, packed, quantise, scaled_weight
from meshwright.execution.runtime.sharding_context import ShardingContext
from meshwright.execution.weights.directory import Tensor
from meshwright.execution.weights.int4 import Int4Tensor
from meshwright.execution.weights.load import LeafReader
from meshwright.execution.weights.places import Place
from meshwright.execution.weights.slices import Bounds, matrix_indices, not_finite, read_slice

NUM_QUANTISERS = 4
"""Number of threads that quantise, each one layer at a time."""


class _Matrix(NamedTuple):
    """One matrix of a device: values [groups, group, columns], and scale and zero (or None) [groups, 1, columns]."""

    values: np.ndarray
    scale: np.ndarray
    zero: np.ndarray | None


def keeps_heads(model: ModelConfig, layout: ShardingContext) -> bool:
    """Whether a mesh stores a model's heads as files do: it neither pads nor copies them."""
    stored = padded(model, layout.mesh, SERVING_RULES)
    pairs = ((stored, model), (stored.with_full_heads, model.with_full_heads))
    return all((ours.num_heads, ours.num_kv_heads) == (own.num_heads, own.num_kv_heads) for ours, own in pairs)


def is_stored_in(tensor: Tensor, dtype: str) -> bool:
    """Whether a checkpoint's tensor is in a format: GPTQ or AWQ for int4, fp8 with a scale for each block for fp8."""
    return isinstance(tensor, Int4Tensor) if dtype == "int4" else dtype == "fp8" and tensor.scale is not None


def scaled_readers(
    model: ModelConfig, mesh: Mesh, layout: ShardingContext, dtype: str, on_bytes: Callable[[int], None]
) -> dict[str, LeafReader]:
    """Return the readers of the weights that have a format, by path, for `load_weights`."""
    return {
        path: partial(
            _read_weight, path=path, parameter=parameter, mesh=mesh, layout=layout, dtype=dtype, done=on_bytes
        )
        for path, parameter in leaves(parameters(padded(model, layout.mesh, SERVING_RULES)))
        if has_format(parameter)
    }


def _read_weight(
    place: Place,
    tensors: Mapping[str, Tensor],
    readers: Executor,
    *,
    path: str,
    parameter: Parameter,
    mesh: Mesh,
    layout: ShardingContext,
    dtype: str,
    done: Callable[[int], None],
) -> ScaledWeight:
    """Return a weight, of which each device has its own part.

    parameter: the declaration, padded as the mesh has it.
    """
    stored = [tensors[name] for _, name in place.names() if is_stored_in(tensors[name], dtype)]
    form = WEIGHT_FORMATS[dtype]
    if stored:
        form = form._replace(group=math.gcd(*map(_group, stored)))
    shape = matrix_shape(parameter, form, mesh=layout.mesh, rules=layout.rules, what=path)
    holders: dict[Bounds, list[Any]] = {}
    whole = NamedSharding(mesh, layout.spec(*parameter.axes))
    indices: Any = whole.addressable_devices_indices_map(parameter.shape)
    for device, index in indices.items():
        bounds = tuple(part.indices(size)[:2] for part, size in zip(index, parameter.shape, strict=True))
        holders.setdefault(bounds, []).append(device)
    parts: list[tuple[Any, ...]] = []
    for bounds, devices in holders.items():
        arrays = _read_part(place, tensors, bounds, shape, dtype, readers)
        parts += [
            tuple(None if array is None else jax.device_put(array, device) for array in arrays) for device in devices
        ]
        jax.block_until_ready(parts[-1])
        done(sum(array.nbytes for array in arrays if array is not None))
    sharding = NamedSharding(mesh, matrix_spec(parameter, layout))

    def joined(arrays: tuple[Any, ...]) -> Any:
        if arrays[0] is None:
            return None
        degrees = (layout.mesh.degree(tuple(axes) if isinstance(axes, tuple) else axes or ()) for axes in sharding.spec)
        sizes = (size * degree for size, degree in zip(arrays[0].shape, degrees, strict=True))
        return jax.make_array_from_single_device_arrays(tuple(sizes), sharding, list(arrays))

    values, scale, zero = map(joined, zip(*parts, strict=True))
    return scaled_weight(values, scale, zero, parameter)


def _group(tensor: Tensor) -> int:
    """Return the number of inputs of a group of a checkpoint's tensor."""
    if isinstance(tensor, Int4Tensor):
        return tensor.width
    assert tensor.scale is not None
    return tensor.scale.block[1]


def _read_part(
    place: Place, tensors: Mapping[str, Tensor], bounds: Bounds, shape: MatrixShape, dtype: str, readers: Executor
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """Return a device's values, scales and zero points (or None) of all layers and experts."""
    depth = summed_dims(place.parameter)[0]
    lead = [range(start, stop) for start, stop in bounds[:depth]]
    sizes = tuple(map(len, lead))

    def one(index: tuple[int, ...]) -> _Matrix:
        numbers = tuple(own[at] for own, at in zip(lead, index, strict=True))
        own = (*((number, number + 1) for number in numbers), *bounds[depth:])
        return _read_matrix(place, tensors, own, shape, dtype, readers)

    with ThreadPoolExecutor(NUM_QUANTISERS) as quantisers:
        matrices = list(quantisers.map(one, np.ndindex(*sizes)))
    dtypes = {matrix.scale.dtype for matrix in matrices}
    scales = [matrix.scale if len(dtypes) == 1 else matrix.scale.astype(np.float32) for matrix in matrices]
    zeros = None
    if any(matrix.zero is not None for matrix in matrices):
        zeros = [np.zeros(matrix.scale.shape, np.int8) if matrix.zero is None else matrix.zero for matrix in matrices]

    def stacked(arrays: Any) -> np.ndarray:
        return np.stack(arrays).reshape(*sizes, *arrays[0].shape)

    return stacked([matrix.values for matrix in matrices]), stacked(scales), None if zeros is None else stacked(zeros)


def _read_matrix(
    place: Place, tensors: Mapping[str, Tensor], bounds: Bounds, shape: MatrixShape, dtype: str, readers: Executor
) -> _Matrix:
    """Return the matrix of one layer and expert, as stored or quantised. bounds: of the parameter, padding included."""
    numbers, is_padding = tuple(start for start, _ in bounds[: len(place.stacked)]), False
    is_padding = any(number >= size for number, size in zip(numbers, place.stacked, strict=True))
    tensor = None if is_padding else tensors[place.name(*numbers)]
    if tensor is None or not is_stored_in(tensor, dtype):
        whole = read_slice(place, tensors, bounds, np.float32, readers)
        return _Matrix(*quantise(whole.reshape(shape.num_groups, shape.group, shape.columns), dtype), None)
    within = tuple(slice(start, stop) for start, stop in bounds[len(place.stacked) :])
    if isinstance(tensor, Int4Tensor):
        return _stored_int4(place, tensor, within, shape)
    return _stored_fp8(place, tensor, within, shape)


def _stored_int4(place: Place, tensor: Int4Tensor, within: tuple[slice, ...], shape: MatrixShape) -> _Matrix:
    """Return a part of a 4-bit tensor of GPTQ or AWQ with its own integers, scales and zero points."""
    inputs, outputs = matrix_indices(place, tensor, within)
    groups = tensor.groups(inputs).reshape(shape.num_groups, shape.group)
    if (groups != groups[:, :1]).any():
        raise scattered_groups(f"{tensor.name} in {tensor.file}")
    codes = tensor.codes(inputs, outputs).astype(np.int8) - np.int8(8)
    scale = tensor.scales(outputs)[groups[:, 0]][:, None]
    if not np.isfinite(scale).all():
        raise not_finite(tensor, scale, scale.dtype)
    zero = (tensor.zeros(outputs)[groups[:, 0]] - 8).astype(np.int8)[:, None]
    return _Matrix(packed(codes.reshape(shape.num_groups, shape.group, shape.columns)), scale, zero)


def _stored_fp8(place: Place, tensor: Tensor, within: tuple[slice, ...], shape: MatrixShape) -> _Matrix:
    """Return a part of an fp8 tensor with its own values, and the scale of its block for each group of a column."""
    assert tensor.scale is not None
    inputs, outputs = matrix_indices(place, tensor, within)
    rows, columns = tensor.scale.block
    groups = (inputs // columns).reshape(shape.num_groups, shape.group)
    assert (groups == groups[:, :1]).all(), "groups are within blocks"
    scale = tensor.scale.tensor.open().astype(np.float32)[outputs // rows][:, groups[:, 0]].T[:, None]
    values = place.view(tensor.open())[within].reshape(shape.num_groups, shape.group, shape.columns)
    if not np.isfinite(scale).all() or ((values.view(np.uint8) & 0x7F) == 0x7F).any():
        raise not_finite(tensor, values if np.isfinite(scale).all() else scale, np.dtype(np.float32))
    return _Matrix(values, np.ascontiguousarray(scale), None)
