"""An array in the notation: a name, named dims, and the mesh axes that shard each dim."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from meshwright.errors import MeshwrightError
from meshwright.record import Kind

SHORT_NAMES: dict[str, Kind] = {"AG": "all-gather", "RS": "reduce-scatter", "AR": "all-reduce", "A2A": "all-to-all"}
"""Collectives by their short names, as in MaxText's `-> RS over x ->`."""

FUNCTION_NAMES: dict[str, Kind] = {
    "AllGather": "all-gather",
    "ReduceScatter": "reduce-scatter",
    "AllReduce": "all-reduce",
    "AllToAll": "all-to-all",
}
"""Collectives by their function names in the scaling book: `AllGather_X(A[I_X, J])`."""

RESERVED = {*SHORT_NAMES, *FUNCTION_NAMES, "over"}
"""Words that cannot name a dim: `-> RS E` would be ambiguous."""

_DIM = re.compile(r"[A-Za-z][A-Za-z0-9]*")
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]*")


@dataclass(frozen=True)
class ShardedArray:
    """An array and its sharding: `C[I_X, K_{dp,tp}]{U_Y}`.

    Attributes:
        name: '' in MaxText's notation, as in `B M_x`.
        dims: the names of the dimensions.
        axes: for each dim, the mesh axes that shard it, outermost first: `I_XY` cuts I into |X| parts and each part
            into |Y|.
        unreduced: the axes over which values are partial sums.
    """

    name: str
    dims: tuple[str, ...]
    axes: tuple[tuple[str, ...], ...]
    unreduced: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if len(self.axes) != len(self.dims):
            raise MeshwrightError(f"{self.label} has {len(self.dims)} dims and mesh axes for {len(self.axes)}")
        if not self.name and not self.dims:
            raise MeshwrightError("an array without dims needs a name, as in C[]")
        if self.name and not _NAME.fullmatch(self.name):
            raise MeshwrightError(f"an array cannot be called {self.name!r}; use letters, digits and _")
        for index, dim in enumerate(self.dims):
            if not _DIM.fullmatch(dim):
                raise MeshwrightError(f"{self.label} has a dim {dim!r}; a dim is a letter, then letters and digits")
            if dim in RESERVED:
                raise MeshwrightError(
                    f"{self.label} has a dim {dim}, which is the notation's own word; call it otherwise"
                )
            if dim in self.dims[:index]:
                raise MeshwrightError(f"{self.label} has dim {dim} twice; a dim may be in an array once")
        places: dict[str, str] = {}
        for dim, axes in (*zip(self.dims, self.axes, strict=True), ("U", self.unreduced)):
            for axis in axes:
                if not _NAME.fullmatch(axis):
                    raise MeshwrightError(
                        f"{self.label} has a mesh axis {axis!r}; an axis is a letter, then letters, digits or _"
                    )
                if axis in places:
                    where = f"{dim} twice" if places[axis] == dim else f"both {places[axis]} and {dim}"
                    raise MeshwrightError(
                        f"mesh axis {axis} is on {where} in {self.label}; an array takes each axis once"
                    )
                places[axis] = dim

    @property
    def label(self) -> str:
        """The array's name or, if it has none, its dims joined: `BM` for `B M_x`."""
        return self.name or "".join(self.dims)

    @property
    def split_axes(self) -> tuple[str, ...]:
        """Every mesh axis that shards a dim, in the order of the dims."""
        return tuple(axis for axes in self.axes for axis in axes)

    def axes_of(self, dim: str) -> tuple[str, ...]:
        """Return the mesh axes that shard a dim; () if the array has no such dim."""
        return self.axes[self.dims.index(dim)] if dim in self.dims else ()

    def dim_of(self, axis: str) -> str | None:
        """Return the dim that a mesh axis shards; None if it shards no dim."""
        return next((dim for dim, axes in zip(self.dims, self.axes, strict=True) if axis in axes), None)

    def with_axes(self, axes: Mapping[str, tuple[str, ...]]) -> ShardedArray:
        """Return this array with other mesh axes on some dims. axes: the new mesh axes, by dim."""
        return replace(self, axes=tuple(axes.get(d, old) for d, old in zip(self.dims, self.axes, strict=True)))

    def has_sharding_of(self, other: ShardedArray) -> bool:
        """Whether both arrays have the same dims and sharding. Their names may differ."""
        return (self.dims, self.axes, set(self.unreduced)) == (other.dims, other.axes, set(other.unreduced))

    def __str__(self) -> str:
        parts = [dim + subscript(axes) for dim, axes in zip(self.dims, self.axes, strict=True)]
        body = f"{self.name}[{', '.join(parts)}]" if self.name else " ".join(parts)
        return body + (f"{{U{subscript(self.unreduced)}}}" if self.unreduced else "")


def subscript(axes: tuple[str, ...]) -> str:
    """Return mesh axes as the subscript of a dim: `_XY`, `_tp`, `_{dp,fsdp}`; '' without axes."""
    if not axes:
        return ""
    if len(axes) == 1 or all(len(axis) == 1 and axis.isupper() for axis in axes):
        return "_" + "".join(axes)
    return f"_{{{','.join(axes)}}}"
