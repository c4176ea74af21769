"""Compute each device's shard of an array, and the device's mesh coordinates, without JAX."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from meshwright.description.notation.array import ShardedArray
from meshwright.description.notation.legality import Sizes, check
from meshwright.errors import MeshwrightError

Span = tuple[int, int]
"""(start, stop) of the indices of one dim that a device holds."""

Block = tuple[Span, ...]
"""The position of one shard in an array: its span of every dim."""

MAX_DEVICES = 65_536
"""The most devices of a mesh; a larger mesh is probably a typing mistake and would fill the memory."""


@dataclass(frozen=True)
class Holder:
    """A device: its number, its mesh coordinates by axis, and the position of its shard."""

    device: int
    coordinates: Mapping[str, int]
    block: Block


@dataclass(frozen=True, kw_only=True)
class Holdings:
    """The shard of one array that each device holds."""

    label: str  # The array as typed, such as `A[I_X, J]`.
    name: str  # The array's name in texts on shards, such as `A[0:4, 0:8]`.
    dims: tuple[str, ...]
    shape: tuple[int, ...]
    # Mesh axes that shard each dim, outermost first; empty, like the degrees, for a sharding without a mesh.
    axes: tuple[tuple[str, ...], ...]
    degrees: Mapping[str, int]
    unreduced: tuple[str, ...]  # Axes over which each device holds a partial sum.
    element_bytes: float  # Can be 0.5 (int4).
    holders: tuple[Holder, ...]

    @cached_property
    def shards(self) -> Mapping[Block, tuple[int, ...]]:
        """The numbers of the devices that hold each shard, in ascending order; shards are in index order."""
        devices: dict[Block, list[int]] = {}
        for holder in self.holders:
            devices.setdefault(holder.block, []).append(holder.device)
        return {block: tuple(sorted(devices[block])) for block in sorted(devices)}

    @cached_property
    def cuts(self) -> tuple[tuple[Span, ...], ...]:
        """For each dim, the spans that it is split into."""
        return tuple(tuple(sorted({block[dim] for block in self.shards})) for dim in range(len(self.shape)))

    @property
    def local_shape(self) -> tuple[int, ...]:
        """The shape of a device's shard."""
        return tuple(stop - start for start, stop in next(iter(self.shards)))

    @property
    def bytes_per_device(self) -> int:
        """Bytes of a device's shard."""
        return math.ceil(math.prod(self.local_shape) * self.element_bytes)

    @property
    def copies(self) -> int:
        """The number of devices that hold the same values: the same shard and, if unreduced, the same partial sum."""
        parts = math.prod(self.degrees[axis] for axis in self.unreduced)
        return len(self.holders) // len(self.shards) // parts

    @property
    def copied_axes(self) -> tuple[str, ...]:
        """The mesh axes of degree above 1 along which the array is replicated."""
        used = {axis for axes in self.axes for axis in axes} | set(self.unreduced)
        return tuple(axis for axis, degree in self.degrees.items() if degree > 1 and axis not in used)

    def block_text(self, block: Block) -> str:
        """Return a shard as code: `A[0:4, 0:8]`, or `A` for an array without dims."""
        spans = ", ".join(f"{start}:{stop}" for start, stop in block)
        return f"{self.name}[{spans}]" if block else self.name

    def to_json(self) -> dict[str, Any]:
        """Return the holdings as plain data."""
        return {
            "array": self.label,
            "shape": list(self.shape),
            "local_shape": list(self.local_shape),
            "mesh": dict(self.degrees),
            "num_shards": len(self.shards),
            "copies": self.copies,
            "unreduced": list(self.unreduced),
            "bytes_per_device": self.bytes_per_device,
            "devices": [
                {
                    "device": holder.device,
                    "coordinates": dict(holder.coordinates),
                    "holds": [list(span) for span in holder.block],
                }
                for holder in self.holders
            ],
        }


def holdings_of(array: ShardedArray, sizes: Sizes) -> Holdings:
    """Return each device's shard of an array such as `A[I_X, J]`.

    Devices are numbered with the last mesh axis fastest. Raises if the sharding is not legal, or if the mesh is too
    large to draw.
    """
    check(array, sizes)
    num_devices = math.prod(sizes.degrees.values())
    if num_devices > MAX_DEVICES:
        raise MeshwrightError(f"a mesh of {num_devices:,} devices is too large to draw; the most is {MAX_DEVICES:,}")
    shape = tuple(sizes.dims[dim] for dim in array.dims)
    return Holdings(
        label=str(array),
        name=array.label,
        dims=array.dims,
        shape=shape,
        axes=array.axes,
        degrees=sizes.degrees,
        unreduced=array.unreduced,
        element_bytes=sizes.element_bytes,
        holders=tuple(device_blocks(shape, array.axes, sizes.degrees)),
    )


def device_blocks(
    shape: tuple[int, ...], axes: tuple[tuple[str, ...], ...], degrees: Mapping[str, int]
) -> Iterator[Holder]:
    """Yield every device of a mesh, the last axis fastest, with its shard's position in an evenly sharded array.

    axes: the mesh axes that shard each dim, outermost first.
    """
    positions = itertools.product(*(range(degree) for degree in degrees.values()))
    for device, position in enumerate(positions):
        coordinates = dict(zip(degrees, position, strict=True))
        blocks = (_span(size, split, coordinates, degrees) for size, split in zip(shape, axes, strict=True))
        yield Holder(device, coordinates, tuple(blocks))


def _span(size: int, axes: tuple[str, ...], coordinates: Mapping[str, int], degrees: Mapping[str, int]) -> Span:
    """Return a device's span of a dim: the first of the dim's axes splits the dim, further ones split its parts."""
    start, length = 0, size
    for axis in axes:
        length //= degrees[axis]
        start += coordinates[axis] * length
    return start, start + length
