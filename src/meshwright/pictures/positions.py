"""Where on a torus each device of a mesh sits: the chips that `jax.make_mesh` (JAX 0.10.2) gives its coordinates."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from typing import NamedTuple

from meshwright.hardware import IDLE, Layout, System

Coordinates = Mapping[str, int]


class Place(NamedTuple):
    """A device of a torus: its slice, its chip's coordinates, and its number on the chip."""

    slice: int
    x: int
    y: int
    z: int
    core: int


def device_places(layout: Layout) -> dict[Place, Coordinates]:
    """The mesh coordinates of every device of a torus; an idle device has none."""
    order = _hand_made_order(layout)
    if order is None:
        return {place: _coordinates(layout, place, _DIMS) for place in _places(layout.system)}
    degrees = _inside(layout)
    positions = list(itertools.product(*map(range, degrees.values())))
    found: dict[Place, Coordinates] = {}
    for number, place in enumerate(_places(layout.system)):
        outer = _coordinates(layout, place, ("slice",))
        inner = dict(zip(degrees, positions[order.index(number % len(order))], strict=True))
        found[place] = {axis: outer[axis] * degrees[axis] + inner[axis] for axis in degrees}
    return found


def is_hand_made(layout: Layout) -> bool:
    """Whether JAX has an order by hand for this mesh, so that its axes do not lie as the layout says."""
    return _hand_made_order(layout) is not None


_DIMS = ("slice", "x", "y", "z", "core")
"""The dimensions of a fabric; a mesh axis that runs over several counts the later ones faster."""


def _coordinates(layout: Layout, place: Place, dims: tuple[str, ...]) -> Coordinates:
    """The coordinate on each mesh axis that the pieces of some dimensions make up."""
    found = dict.fromkeys([*layout.degrees, IDLE], 0)
    for dim in dims:
        for piece in layout.pieces:
            if piece.dim == dim:
                at = getattr(place, dim) // piece.stride % piece.size
                found[piece.axis] = found[piece.axis] * piece.size + at
    is_idle = found.pop(IDLE) > 0
    return {} if is_idle else found


def _inside(layout: Layout) -> dict[str, int]:
    """The part of each mesh axis's degree that lies inside a slice."""
    inside = [piece for piece in layout.pieces if piece.dim != "slice"]
    return {axis: math.prod(piece.size for piece in inside if piece.axis == axis) for axis in layout.degrees}


def _places(system: System) -> list[Place]:
    """The devices as JAX numbers them: slice by slice, x fastest of the chips, the devices of a chip together."""
    x, y, z = (*system.shape, 1, 1)[:3]
    numbers = itertools.product(range(system.num_slices), range(z), range(y), range(x), range(system.devices_per_chip))
    return [Place(number, i, j, k, core) for number, k, j, i, core in numbers]


_RING_OF_4 = (0, 1, 3, 2)
_RING_OF_8 = (0, 1, 2, 3, 7, 6, 5, 4)
_RING_OF_16 = (0, 1, 2, 3, 7, 6, 5, 9, 10, 11, 15, 14, 13, 12, 8, 4)
_RING_OF_CUBE = (0, 1, 3, 2, 6, 7, 5, 4)
_RING_OF_TWO_CORES = (0, 1, 2, 3, 6, 7, 4, 5)


def _hand_made_order(layout: Layout) -> list[int] | None:
    """The devices of a slice in the order of the mesh where JAX has one by hand, None where it follows the torus.

    Small slices are laid along a ring, whatever the mesh: the functions `_v5e_create_device_mesh`,
    `_v5p_create_device_mesh`, `_7x_create_device_mesh` and `_tpu_v2_v3_create_device_mesh` of jax/_src/mesh_utils.py.
    """
    chip, shape, degrees = layout.system.chip.name, layout.system.shape, tuple(_inside(layout).values())
    count = math.prod(shape) * layout.system.devices_per_chip
    if any(piece.axis == IDLE for piece in layout.pieces):
        return None
    if chip in ("v5e", "v6e"):
        if count == 16 and shape == (4, 4) and max(degrees) == 16:
            return list(_RING_OF_16)
        return list({4: _RING_OF_4, 8: _RING_OF_8}.get(count, ())) or None
    if chip == "v5p" and shape == (2, 2, 2):
        return list(_RING_OF_CUBE)
    if chip == "tpu7x" and max(shape[:2]) <= 2 and count % 8 == 0 and count <= 32:
        return _repeated(_RING_OF_TWO_CORES, count)
    if chip == "v3":
        return _repeated(_RING_OF_TWO_CORES, count) if count == 8 or degrees[-1] == 8 else list(range(count))
    return None


def _repeated(order: tuple[int, ...], count: int) -> list[int]:
    """An order of 8 devices, for every 8 of them."""
    return [start + number for start in range(0, count, 8) for number in order]
