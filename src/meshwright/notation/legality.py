"""Whether an array can lie on a mesh as written, and what each device then holds of it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from meshwright.errors import MeshwrightError
from meshwright.mesh import divisors
from meshwright.notation.array import ShardedArray


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """The numbers behind the letters: the degree of each mesh axis, the size of each dim, the bytes of an element.

    element_bytes is 2 for bf16; half a byte (int4) is 0.5.
    """

    degrees: Mapping[str, int]
    dims: Mapping[str, int]
    element_bytes: float = 2

    def degree(self, axes: Iterable[str]) -> int:
        """The product of the degrees of some axes: the number of parts they cut a dim into."""
        return math.prod(self.degrees[axis] for axis in axes)

    def local_size(self, array: ShardedArray, dim: str) -> int:
        """What one device holds of a dim of a legal array."""
        return self.dims[dim] // self.degree(array.axes_of(dim))

    def local_shape(self, array: ShardedArray) -> tuple[int, ...]:
        """The shape that one device holds of a legal array."""
        return tuple(self.local_size(array, dim) for dim in array.dims)

    def local_bytes(self, array: ShardedArray) -> int:
        """The bytes that one device holds of a legal array."""
        return math.ceil(math.prod(self.local_shape(array)) * self.element_bytes)

    def total_bytes(self, array: ShardedArray) -> int:
        """The bytes that all devices together hold of a legal array, its copies counted."""
        return self.local_bytes(array) * math.prod(self.degrees.values())


def check(array: ShardedArray, sizes: Sizes) -> None:
    """Raise for an axis that the mesh has not, a dim without a size, or degrees that do not divide a dim."""
    for axis in (*array.split_axes, *array.unreduced):
        if axis not in sizes.degrees:
            known = ", ".join(sizes.degrees) or "none"
            raise MeshwrightError(f"{array} is split over {axis}, which the mesh has not; its axes are {known}")
    for dim, axes in zip(array.dims, array.axes, strict=True):
        if dim not in sizes.dims:
            known = ", ".join(sizes.dims) or "none"
            raise MeshwrightError(f"dim {dim} of {array} has no size; there are sizes for {known}")
        if sizes.dims[dim] % sizes.degree(axes):
            raise MeshwrightError(_indivisible(array, dim, axes, sizes))


def is_legal(array: ShardedArray, sizes: Sizes) -> bool:
    """Whether the degrees divide the dims of an array whose axes and dims are all known."""
    return all(sizes.dims[dim] % sizes.degree(axes) == 0 for dim, axes in zip(array.dims, array.axes, strict=True))


def _indivisible(array: ShardedArray, dim: str, axes: tuple[str, ...], sizes: Sizes) -> str:
    """What is wrong with a dim that does not divide, and the degrees and the sizes that would do."""
    size, degree = sizes.dims[dim], sizes.degree(axes)
    degrees = "*".join(f"{axis}={sizes.degrees[axis]}" for axis in axes) + (f" = {degree}" if len(axes) > 1 else "")
    below = size // degree * degree
    multiples = " or ".join(f"{dim}={multiple}" for multiple in (below, below + degree) if multiple)
    return (
        f"{degrees} cannot split {dim}={size} of {array}: {size} % {degree} = {size % degree};"
        f" use {multiples}, or a degree in {', '.join(map(str, divisors(size)))}"
    )
