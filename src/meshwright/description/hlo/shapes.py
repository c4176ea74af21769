"""Shapes in HLO text: arrays with dtype, dims and layout, and tuples of shapes."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

from meshwright.errors import MeshwrightError


@dataclass(frozen=True, slots=True)
class Shape:
    """An array, or a tuple of shapes (`dtype` is then 'tuple').

    layout: the text printed between braces: minor-to-major order of the dims, tiles, memory space. elements: the shapes
    in a tuple.
    """

    dtype: str
    dims: tuple[int, ...] = ()
    layout: str = ""
    elements: tuple[Shape, ...] = ()

    @property
    def size(self) -> int:
        """Number of elements of an array."""
        return math.prod(self.dims)

    @property
    def bytes(self) -> int:
        """Bytes of the data without tile padding; of a tuple, the sum over its arrays."""
        if self.dtype == "tuple":
            return sum(element.bytes for element in self.elements)
        return (self.size * dtype_bits(self.dtype) + 7) // 8

    @property
    def minor_to_major(self) -> tuple[int, ...]:
        """The dims of an array in the order of its layout; the elements of the first dim are adjacent in memory."""
        return tuple(int(dim) for dim in self.layout.partition(":")[0].split(",") if dim)

    @property
    def padded_bytes(self) -> int:
        """Bytes with dims padded to the first tile of the layout (TPU).

        Further tiles, inside the first, only reorder elements (openxla.org/xla/tiled_layout).
        """
        if self.dtype == "tuple":
            return sum(element.padded_bytes for element in self.elements)
        found = _TILE.search(self.layout)
        if found is None:
            return self.bytes
        order = self.minor_to_major
        tile = [int(size) for size in found[1].split(",")]
        # Dims from major to minor. An array with fewer dims than the tile gets leading dims of 1.
        dims = [1] * (len(tile) - len(order)) + [self.dims[dim] for dim in reversed(order)]
        filled = [-(-dim // size) * size for dim, size in zip(dims[-len(tile) :], tile, strict=True)]
        return (math.prod(dims[: -len(tile)]) * math.prod(filled) * dtype_bits(self.dtype) + 7) // 8

    @property
    def memory_space(self) -> int:
        """The number n of the layout's memory space S(n): 0 is the device's main memory, 5 the host's memory.

        Others depend on the backend: 1 is VMEM on TPUs, and on GPUs the part of main memory that collectives use.
        """
        found = _SPACE.search(self.layout)
        return int(found[1]) if found else 0

    @property
    def is_in_hbm(self) -> bool:
        """Whether an array is in the device's main memory.

        Space 1 is VMEM if the layout has tiles, as only TPU arrays have; otherwise it is a part of main memory.
        """
        return self.memory_space == 0 or (self.memory_space == 1 and not _TILE.search(self.layout))

    @property
    def hbm_bytes(self) -> int:
        """Bytes in main memory; of a tuple, the sum over its arrays."""
        return sum(array.padded_bytes for array in self.arrays() if array.is_in_hbm)

    def arrays(self) -> Iterator[Shape]:
        """Yield the shape itself if it is an array; else all arrays in the tuple, from left to right."""
        if self.dtype != "tuple":
            yield self
        for element in self.elements:
            yield from element.arrays()

    def __str__(self) -> str:
        """Return the shape as HLO prints it, without the layout."""
        if self.dtype == "tuple":
            return f"({', '.join(map(str, self.elements))})"
        return f"{self.dtype}[{','.join(map(str, self.dims))}]"


_BITS = {"pred": 8, "c64": 64, "c128": 128, "token": 0, "opaque": 0}
_NUMBER = re.compile(r"(?:bf|[fsu])(\d{1,3})")

_TILE = re.compile(r"T\(([\d,]+)\)")
_SPACE = re.compile(r"S\((\d{1,9})\)")

_ARRAY = re.compile(r"([a-z]\w*)\[((?:(?:<=)?\d{1,18}(?:,(?:<=)?\d{1,18})*+)?)\](?:\{([^{}\n]*)\})?")
_NEXT = re.compile(r"(?:\s|,|/\*.*?\*/)*+")


def dtype_bits(dtype: str) -> int:
    """Return bits per element: `bf16` 16, `f8e4m3fn` 8, `s4` 4, `pred` 8. Raises for a dtype that HLO does not have."""
    if dtype in _BITS:
        return _BITS[dtype]
    found = _NUMBER.match(dtype)
    if found is None:
        raise MeshwrightError(f"HLO has no dtype {dtype!r}; arrays are f32, bf16, s32, pred and the like")
    return int(found[1])


class ShapeReader:
    """A function that reads the shape at a position of a text, with a cache of array shapes."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.known: dict[str, Shape] = {}

    def __call__(self, position: int) -> tuple[Shape, int]:
        """Return the shape at `position`, and the position after it."""
        if not self.text.startswith("(", position):
            return self.array(position)
        # An explicit stack of the open tuples' elements, because deep nesting would overflow Python's stack.
        open_tuples: list[list[Shape]] = []
        while True:
            if self.text.startswith("(", position):
                open_tuples.append([])
                position += 1
            elif self.text.startswith(")", position):
                shape = Shape("tuple", elements=tuple(open_tuples.pop()))
                position += 1
                if not open_tuples:
                    return shape, position
                open_tuples[-1].append(shape)
            else:
                shape, position = self.array(position)
                open_tuples[-1].append(shape)
            found = _NEXT.match(self.text, position)
            position = found.end() if found else position

    def array(self, position: int) -> tuple[Shape, int]:
        """Return the array shape at `position`, and the position after it. Raises if there is no shape."""
        found = _ARRAY.match(self.text, position)
        if found is None:
            number = self.text.count("\n", 0, position) + 1
            raise MeshwrightError(f"HLO text line {number}: no shape in {self.text[position : position + 40]!r}")
        shape = self.known.get(found[0])
        if shape is None:
            dtype_bits(found[1])
            dims = tuple(int(dim) for dim in found[2].replace("<=", "").split(",") if dim)
            shape = self.known[found[0]] = Shape(found[1], dims, found[3] or "")
        return shape, found.end()
