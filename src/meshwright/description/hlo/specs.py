"""Shardings by mesh axes, parsed from HLO's notation, which lists devices, and Shardy's, which names axes."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from meshwright.description.hlo.groups import Axes, iota, mesh_devices, numbers, sub_axes

_TILED = re.compile(r"\{devices=\[([\d,]+)\](?:<=\[([\d,]+)\](?:T\(([\d,]+)\))?|([\d,]+))([^}]*)")
_DEVICE_IDS = r"(?:, device_ids=\(((?:[^()]|\([^()]*\))*)\))?"
_NAMED = re.compile(r"\{mesh\[([^\]]*)\]" + _DEVICE_IDS + r", (?:\[([^\]]*)\]|replicated)(.*)\}")
_LAST_DIMS = re.compile(r"last_tile_dims=\{([\w, ]*)\}?")
_BY_AXES = re.compile(r", ?\[([^\]]*)\]([^>]*)>")
_DIM = re.compile(r"\{([^{}]*)\}")
_NAME = re.compile(r'\\?"([^"\\]+)\\?"(:\(\d+\)\d+)?')
_UNREDUCED = re.compile(r"unreduced=\w*\{([^{}]*)\}")


@dataclass(frozen=True, kw_only=True)
class Spec:
    """The sharding of an array.

    dims: for each dim, the mesh axes that shard it, outermost first; None for an open dim, which the partitioner may
    shard in any way. unreduced: the axes over which values are partial sums.
    """

    dims: tuple[Axes | None, ...]
    unreduced: Axes = ()

    def __str__(self) -> str:
        """Return the text of the PartitionSpec, with `?` for an open dim."""
        words = [_dim(axes) for axes in self.dims]
        left = ", ".join(map(repr, self.unreduced))
        return f"P({', '.join([*words, *([f'unreduced={{{left}}}'] if left else [])])})"

    @property
    def axes(self) -> Axes:
        """The mesh axes that shard any dim."""
        return tuple(axis for dim in self.dims for axis in dim or ())

    def allows(self, other: Spec) -> bool:
        """Whether another spec satisfies this one: it is equal in every dim that is not open here.

        Unreduced axes are ignored: the partitioner may sum earlier or later than requested.
        """
        same = all(mine is None or mine == yours for mine, yours in zip(self.dims, other.dims, strict=False))
        return same and len(self.dims) == len(other.dims)


def parse_hlo_sharding(text: str, rank: int, mesh: Mapping[str, int]) -> Spec | None:
    """Parse an HLO `sharding` attribute of an array with `rank` dims.

    Its forms are `{replicated}`, `{devices=[2,1,4]<=[8] last_tile_dim_replicate}`, `{devices=[2,2]0,2,1,3}`, and, on a
    mesh that the program declares, `{mesh['x'=2,'y'=4], [{'x'}, {?}], unreduced={'y'}}` (jaxlib 0.11). None if the
    sharding is not a product of the axes of `mesh`, is manual, or is on a single device or other devices than those of
    `mesh`.
    """
    if text.startswith("{replicated"):
        return Spec(dims=((),) * rank)
    if named := _NAMED.match(text):
        return _parse_named_sharding(named, rank, mesh)
    found = _TILED.match(text)
    tiles = _tiles(found, math.prod(mesh.values())) if found else None
    if found is None or tiles is None or tiles.ndim < rank:
        return None
    places = np.empty((tiles.ndim, tiles.size), dtype=np.int64)
    places[:, tiles.ravel()] = np.indices(tiles.shape).reshape(tiles.ndim, -1)
    axes = [_axes(places[dim], size, mesh) for dim, size in enumerate(tiles.shape)]
    # The tiles' first dims are those of the array; the last ones are for replication or partial sums.
    last = _LAST_DIMS.search(found[5])
    roles = [role.strip() for role in last[1].split(",")] if last else []
    roles += ["replicated"] * (tiles.ndim - rank - len(roles))
    if any(one is None for one in axes[:rank]) or "manual" in roles:
        return None
    summed = [one for one, role in zip(axes[rank:], roles, strict=False) if role == "unreduced"]
    return Spec(dims=tuple(axes[:rank]), unreduced=tuple(axis for one in summed for axis in one or ()))


def parse_shardy_sharding(text: str, mesh: Mapping[str, int]) -> Spec | None:
    """Parse a Shardy attribute: `#sdy.sharding<@mesh, [{"x"}, {?}], unreduced={"y"}>`.

    None if a dim is sharded over a part of an axis, or if the text has no sharding.
    """
    found = _BY_AXES.search(text)
    if found is None or ":(" in found[0]:
        return None
    left = _UNREDUCED.search(found[2])
    # Axes of degree 1 are left out, as in `parse_hlo_sharding`.
    live = {axis for axis, degree in mesh.items() if degree > 1}
    dims = [
        None if dim.strip() == "?" else tuple(name for name, _ in _NAME.findall(dim) if name in live)
        for dim in _DIM.findall(found[1])
    ]
    unreduced = tuple(name for name, _ in _NAME.findall(left[1]) if name in live) if left else ()
    return Spec(dims=tuple(dims), unreduced=unreduced)


def _parse_named_sharding(found: re.Match[str], rank: int, mesh: Mapping[str, int]) -> Spec | None:
    """Return, on the axes of `mesh`, a sharding over the axes of another mesh of the same devices.

    Axes of degree 1 are left out. None as in `parse_hlo_sharding`.

    found: the match of the sharding's text.
    """
    if found[3] is None:
        return Spec(dims=((),) * rank)
    try:
        degrees, devices = mesh_devices(found[1], found[2] or "")
        if "manual=" in found[4] or sorted(devices.tolist()) != list(range(math.prod(mesh.values()))):
            return None
        index = np.empty((len(degrees), devices.size), dtype=np.int64)
        index[:, devices] = np.unravel_index(np.arange(devices.size), tuple(degrees.values()))
        along = dict(zip(degrees, index, strict=True))
        texts = [dim.strip() for dim in _DIM.findall(found[3])]
        left = _UNREDUCED.search(found[4])
        dims = [_axes(*_positions(text, degrees, along), mesh) for text in texts]
        unreduced = _axes(*_positions(left[1] if left else "", degrees, along), mesh)
    except (ValueError, KeyError, ZeroDivisionError):
        return None
    if len(dims) != rank or None in dims:
        return None
    return Spec(
        dims=tuple(None if "?" in text else axes for text, axes in zip(texts, dims, strict=True)),
        unreduced=unreduced or (),
    )


def _positions(text: str, degrees: Mapping[str, int], index: Mapping[str, np.ndarray]) -> tuple[np.ndarray, int]:
    """Return the shard of a dim that each device has, [devices], and the number of shards.

    Args:
        text: the axes that shard the dim, such as `'x','y':(2)2`.
        degrees: the degree of each axis.
        index: each device's index along each axis, [devices].
    """
    places = np.zeros_like(next(iter(index.values())))
    parts = sub_axes(text.replace("?", ""), degrees)
    for axis, part in parts:
        places = places * part.size + index[axis] // part.step % part.size
    return places, math.prod(part.size for _, part in parts)


def _tiles(found: re.Match[str], num_devices: int) -> np.ndarray | None:
    """Return the device id of each tile, in the tiles' shape; None if they are not the devices of the mesh."""
    try:
        listed = found[4] is not None
        devices = np.array(numbers(found[4])) if listed else iota(numbers(found[2]), found[3]).ravel()
    except ValueError:
        return None
    shape = numbers(found[1])
    if math.prod(shape) != num_devices or sorted(devices.tolist()) != list(range(num_devices)):
        return None
    return devices.reshape(shape)


def _axes(places: np.ndarray, size: int, mesh: Mapping[str, int]) -> Axes | None:
    """Return the mesh axes, outermost first, that shard a dim; None if no product of axes does.

    Args:
        places: the shard of the dim that each device has, [devices].
        size: the number of shards.
        mesh: the degree of every axis, in device order.
    """
    index = dict(zip(mesh, np.unravel_index(np.arange(places.size), tuple(mesh.values())), strict=True))
    # Along each axis larger than 1: the difference between the shards of neighbouring devices.
    firsts = {axis: np.flatnonzero(index[axis] == 1) for axis, degree in mesh.items() if degree > 1}
    steps = {axis: int(places[devices[0]]) for axis, devices in firsts.items()}
    axes = tuple(sorted((axis for axis, step in steps.items() if step > 0), key=lambda axis: -steps[axis]))
    whole = math.prod(mesh[axis] for axis in axes) == size
    if not whole or not np.array_equal(sum((index[a] * steps[a] for a in axes), np.zeros_like(places)), places):
        return None
    return axes


def _dim(axes: Axes | None) -> str:
    if axes is None:
        return "?"
    if len(axes) < 2:
        return repr(axes[0]) if axes else "None"
    return f"({', '.join(map(repr, axes))})"
