"""Check that a mesh can shard an array as written, and compute the size of each device's shard."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from meshwright.description.notation.array import ShardedArray
from meshwright.errors import MeshwrightError
from meshwright.mesh import divisors


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """The degree of each mesh axis, the size of each dim, and the bytes of an element: 2 for bf16, 0.5 for int4."""

    degrees: Mapping[str, int]
    dims: Mapping[str, int]
    element_bytes: float = 2

    def degree(self, axes: Iterable[str]) -> int:
        """Return the number of shards over some axes: the product of their degrees."""
        return math.prod(self.degrees[axis] for axis in axes)

    def local_size(self, array: ShardedArray, dim: str) -> int:
        """Return the size of a dim of a legal array on one device."""
        return self.dims[dim] // self.degree(array.axes_of(dim))

    def local_shape(self, array: ShardedArray) -> tuple[int, ...]:
        """Return the shape of one device's shard of a legal array."""
        return tuple(self.local_size(array, dim) for dim in array.dims)

    def local_bytes(self, array: ShardedArray) -> int:
        """Return the bytes of one device's shard of a legal array."""
        return math.ceil(math.prod(self.local_shape(array)) * self.element_bytes)


def check(array: ShardedArray, sizes: Sizes) -> None:
    """Raise if a mesh cannot have an array: it lacks an axis, a dim has no size, or degrees do not divide a dim."""
    for axis in (*array.split_axes, *array.unreduced):
        if axis not in sizes.degrees:
            known = ", ".join(sizes.degrees) or "none"
            raise MeshwrightError(f"{array} is split over {axis}, which the mesh does not have; its axes are {known}")
    for dim, axes in zip(array.dims, array.axes, strict=True):
        if dim not in sizes.dims:
            known = ", ".join(sizes.dims) or "none"
            raise MeshwrightError(f"dim {dim} of {array} has no size; there are sizes for {known}")
        if sizes.dims[dim] % sizes.degree(axes):
            size, degree = sizes.dims[dim], sizes.degree(axes)
            degrees = "*".join(f"{axis}={sizes.degrees[axis]}" for axis in axes) + (
                f" = {degree}" if len(axes) > 1 else ""
            )
            below = size // degree * degree
            multiples = " or ".join(f"{dim}={multiple}" for multiple in (below, below + degree) if multiple)
            raise MeshwrightError(
                f"{degrees} cannot split {dim}={size} of {array}: {size} % {degree} = {size % degree};"
                f" use {multiples}, or a degree in {', '.join(map(str, divisors(size)))}"
            )


def is_legal(array: ShardedArray, sizes: Sizes) -> bool:
    """Whether the degrees divide the dims of an array. Every dim must have a size."""
    return all(sizes.dims[dim] % sizes.degree(axes) == 0 for dim, axes in zip(array.dims, array.axes, strict=True))
