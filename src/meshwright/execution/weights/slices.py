"""Copy a device's slice of a parameter out of the tensors that contain it.

The memory of a slice is aligned so that XLA:CPU can use it without a copy. It is filled in blocks that stay in a core's
cache while they are transposed, cast, and checked for values that are not finite.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from concurrent.futures import Executor, wait
from typing import Any

import ml_dtypes
import numpy as np

from meshwright.errors import MeshwrightError
from meshwright.execution.weights.directory import Tensor
from meshwright.execution.weights.int4 import Int4Tensor
from meshwright.execution.weights.mxfp4 import Mxfp4Tensor
from meshwright.execution.weights.places import Place

Bounds = tuple[tuple[int, int], ...]
"""(start, stop) of a slice along each dim of a parameter."""

BLOCK = (256, 512)
"""Rows and columns, in the order of the file, of a block that is transposed at once: 256 KB for 16-bit values."""

TASK_BYTES = 16_000_000
"""Bytes of a slice that a thread copies in one task."""

ALIGNMENT = 64
"""Arrays begin at an address that is a multiple of this many bytes, so that XLA:CPU uses them in place."""

_EXPONENT: Mapping[Any, tuple[Any, int]] = {
    np.dtype(ml_dtypes.bfloat16): (np.uint16, 0x7F80),
    np.dtype(np.float16): (np.uint16, 0x7C00),
    np.dtype(np.float32): (np.uint32, 0x7F800000),
    np.dtype(np.float64): (np.uint64, 0x7FF0000000000000),
}
"""{dtype: (integer dtype of the same size, mask of the exponent's bits)}; all of these bits are set if not finite."""


def read_slice(
    place: Place, tensors: Mapping[str, Tensor], bounds: Bounds, dtype: Any, readers: Executor
) -> np.ndarray:
    """Return the slice of a parameter within `bounds` in `dtype`, read in several threads.

    Elements beyond the parameter's own size, which pad it, are zeros.

    Raises:
        MeshwrightError: values are not finite, or overflow `dtype`.
    """
    result = _aligned([stop - start for start, stop in bounds], np.dtype(dtype))
    depth = len(place.stacked)
    within = tuple(slice(start, stop) for start, stop in bounds[depth:])
    sizes = [
        len(range(*slice(start, stop).indices(size)))
        for (start, stop), size in zip(bounds, place.parameter.shape, strict=True)
    ]
    held = tuple(map(slice, sizes[depth:]))
    if tuple(sizes) != result.shape:
        result[...] = 0
    tasks = []
    for numbers in np.ndindex(*sizes[:depth]):
        tensor = tensors[place.name(*(number + start for number, (start, _) in zip(numbers, bounds, strict=False)))]
        target = result[numbers][held]
        rows = max(1, TASK_BYTES // max(1, target[:1].nbytes))
        parts = (slice(start, start + rows) for start in range(0, len(target), rows))
        tasks += [readers.submit(_copy, place, tensor, within, part, target) for part in parts]
    wait(tasks)
    for task in tasks:
        task.result()
    return result


def _aligned(shape: list[int], dtype: np.dtype[Any]) -> np.ndarray:
    nbytes = math.prod(shape) * dtype.itemsize
    memory = np.empty(nbytes + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return memory[start : start + nbytes].view(dtype).reshape(shape)


def _copy(place: Place, tensor: Tensor, within: tuple[slice, ...], part: slice, target: np.ndarray) -> None:
    """Copy a part of a slice from one tensor into the same part of `target`, block by block in the order of the file.

    within: the slice of the parameter's dims in this tensor. part: rows of the slice to copy.
    """
    if isinstance(tensor, Mxfp4Tensor):
        _copy_mxfp4(place, tensor, within, part, target)
        return
    if isinstance(tensor, Int4Tensor):
        _copy_int4(place, tensor, within, part, target)
        return
    source, target = place.view(tensor.open())[within][part], target[part]
    order = sorted(range(source.ndim), key=lambda dim: -source.strides[dim])
    source, bits = source.transpose(order), target.transpose(order)
    if tensor.scale is not None:
        scales = tensor.scale.tensor.open().astype(np.float32)
        # For each value of the slice, the row and the column of its scale, as views that take no memory.
        numbers = np.ogrid[tuple(slice(size) for size in tensor.shape)]
        places = tuple(
            place.view(np.broadcast_to(each // step, tensor.shape))[within][part].transpose(order)
            for each, step in zip(numbers, tensor.scale.block, strict=True)
        )
    exponent = _EXPONENT[target.dtype]
    bits = bits.view(exponent[0])
    # A block spans the two dims that are last in the file, and one index of all others.
    sizes = [1] * (source.ndim - 2) + [*BLOCK][-source.ndim :]
    steps = [range(0, size, step) for size, step in zip(source.shape, sizes, strict=True)]
    for corner in np.ndindex(*map(len, steps)):
        at = tuple(
            slice(start := steps[dim][number], start + size)
            for dim, (number, size) in enumerate(zip(corner, sizes, strict=True))
        )
        values = source[at]
        if tensor.scale is not None:
            values = values.astype(np.float32) * scales[places[0][at], places[1][at]]
        block = _cast(values, target.dtype).view(exponent[0])
        if (block & exponent[1]).max() == exponent[1]:
            raise not_finite(tensor, values, target.dtype)
        bits[at] = block


def _copy_mxfp4(place: Place, tensor: Mxfp4Tensor, within: tuple[slice, ...], part: slice, target: np.ndarray) -> None:
    """Like `_copy` for an MXFP4 tensor, one expert after the other."""
    # For each value of the slice, its expert, row and column in the tensor, as views that take no memory.
    numbers = np.ogrid[tuple(slice(size) for size in tensor.shape)]
    views = [place.view(np.broadcast_to(each, tensor.shape))[within][part] for each in numbers]
    experts, inputs, outputs = (
        view[tuple(slice(None) if dim == own else 0 for dim in range(3))] for own, view in enumerate(views)
    )
    columns = slice(int(outputs[0]), int(outputs[-1]) + 1, int(outputs[1] - outputs[0]) if len(outputs) > 1 else 1)
    rows = slice(int(inputs[0]), int(inputs[-1]) + 1)
    for number, expert in enumerate(experts.tolist()):
        values = tensor.values(slice(expert, expert + 1), rows, columns)[0]
        target[part][number] = block = _cast(values, target.dtype)
        if not np.isfinite(block.astype(np.float32)).all():
            raise not_finite(tensor, values, target.dtype)


def _copy_int4(place: Place, tensor: Int4Tensor, within: tuple[slice, ...], part: slice, target: np.ndarray) -> None:
    """Like `_copy` for a 4-bit tensor of GPTQ or AWQ."""
    inputs, outputs = matrix_indices(place, tensor, within, part)
    target[part] = block = _cast(tensor.values(inputs, outputs).reshape(target[part].shape), target.dtype)
    if not np.isfinite(block.astype(np.float32)).all():
        raise not_finite(tensor, tensor.values(inputs, outputs), target.dtype)


def matrix_indices(
    place: Place, tensor: Tensor, within: tuple[slice, ...], part: slice = slice(None)
) -> tuple[np.ndarray, np.ndarray]:
    """Return the indices in a tensor [out, in] of the inputs and of the outputs of a slice, in the slice's order.

    within, part: as in `_copy`.
    """
    # For each value of the slice, its row and column in the tensor, as views that take no memory.
    numbers = np.ogrid[tuple(slice(size) for size in tensor.shape)]
    outputs, inputs = (place.view(np.broadcast_to(each, tensor.shape))[within][part] for each in numbers)
    depth = len(place.inputs)
    return inputs[(..., *(0,) * (inputs.ndim - depth))].ravel(), outputs[(0,) * depth].ravel()


def _cast(block: np.ndarray, dtype: np.dtype[Any]) -> np.ndarray:
    """Return a copy of a block in C order and another dtype."""
    if block.dtype == ml_dtypes.bfloat16 and dtype == np.float32:
        # bfloat16 is the upper half of float32; the cast of ml_dtypes would hold the interpreter's lock.
        return (block.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    with np.errstate(over="ignore"):
        return block.astype(dtype, order="C")


def not_finite(tensor: Tensor, block: np.ndarray, dtype: np.dtype[Any]) -> MeshwrightError:
    """Return the error for a tensor with values that are not finite."""
    values = block.astype(np.float64)
    if np.isfinite(values).all():
        return MeshwrightError(f"{tensor.name} in {tensor.file} has values that are too large for {dtype.name}")
    kind = "NaN" if np.isnan(values).any() else "infinite values"
    return MeshwrightError(f"{tensor.name} in {tensor.file} has {kind}; these weights cannot be used")
