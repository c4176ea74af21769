"""Where on a torus each device of a mesh is: the chips that `jax.make_mesh` (JAX 0.10.2) assigns."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from typing import NamedTuple

from meshwright.hardware import IDLE, MeshPlacement, System

Coordinates = Mapping[str, int]


class Place(NamedTuple):
    """A device of a torus: slice, chip coordinates, number on the chip."""

    slice: int
    x: int
    y: int
    z: int
    core: int


def device_coordinates(layout: MeshPlacement) -> dict[Place, Coordinates]:
    """The mesh coordinates of every device of a torus; an idle device has none."""
    order = layout.order
    if order is None:
        return {place: _coordinates(layout, place, _DIMS) for place in _devices(layout.system)}
    degrees = _degrees_in_slice(layout)
    positions = list(itertools.product(*map(range, degrees.values())))
    found: dict[Place, Coordinates] = {}
    for number, place in enumerate(_devices(layout.system)):
        outer = _coordinates(layout, place, ("slice",))
        inner = dict(zip(degrees, positions[order.index(number % len(order))], strict=True))
        found[place] = {axis: outer[axis] * degrees[axis] + inner[axis] for axis in degrees}
    return found


_DIMS = ("slice", "x", "y", "z", "core")
"""The dimensions of a fabric; a mesh axis over several counts the later ones faster."""


def _coordinates(layout: MeshPlacement, place: Place, dims: tuple[str, ...]) -> Coordinates:
    """The mesh coordinates made up of the pieces of some fabric dimensions."""
    found = dict.fromkeys([*layout.degrees, IDLE], 0)
    for dim in dims:
        for piece in layout.pieces:
            if piece.dim == dim:
                at = getattr(place, dim) // piece.stride % piece.size
                found[piece.axis] = found[piece.axis] * piece.size + at
    is_idle = found.pop(IDLE) > 0
    return {} if is_idle else found


def _degrees_in_slice(layout: MeshPlacement) -> dict[str, int]:
    """The part of each mesh axis's degree inside a slice."""
    inside = [piece for piece in layout.pieces if piece.dim != "slice"]
    return {axis: math.prod(piece.size for piece in inside if piece.axis == axis) for axis in layout.degrees}


def _devices(system: System) -> list[Place]:
    """The devices in JAX's order: slice by slice, x fastest, the devices of a chip together."""
    x, y, z = (*system.shape, 1, 1)[:3]
    numbers = itertools.product(range(system.num_slices), range(z), range(y), range(x), range(system.devices_per_chip))
    return [Place(number, i, j, k, core) for number, k, j, i, core in numbers]
