"""JAX's hard-coded device orders for small slices: along a ring of neighbours, for any mesh.

From the functions `_v5e_create_device_mesh`, `_v5p_create_device_mesh`, `_7x_create_device_mesh` and
`_tpu_v2_v3_create_device_mesh` of jax/_src/mesh_utils.py (JAX 0.10.2).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from meshwright.description.hardware.system import System

_RING_OF_4 = (0, 1, 3, 2)
_RING_OF_8 = (0, 1, 2, 3, 7, 6, 5, 4)
_RING_OF_16 = (0, 1, 2, 3, 7, 6, 5, 9, 10, 11, 15, 14, 13, 12, 8, 4)
_RING_OF_CUBE = (0, 1, 3, 2, 6, 7, 5, 4)
_RING_OF_TWO_CORES = (0, 1, 2, 3, 6, 7, 4, 5)


@dataclass(frozen=True)
class DeviceOrder:
    """The devices of a slice, by JAX's ids, in the order of the mesh.

    dims: names and sizes of the physical dimensions in that order, outermost first: `xy` (`xyz`) is one ring of
    neighbours through these axes.
    """

    order: tuple[int, ...]
    dims: tuple[tuple[str, int], ...]


def jax_device_order(system: System, degrees: tuple[int, ...]) -> DeviceOrder | None:
    """Return the hard-coded order of a slice for a mesh of all its devices; None if JAX maps the mesh onto the torus.

    degrees: degrees of the mesh axes inside a slice, outermost first. JAX orders v5e:2x4 by the ring of a 4x2 slice;
    here it counts as a ring, since a 2x4 slice has one too.
    """
    chip, shape = system.chip.name, system.shape
    count = math.prod(shape) * system.devices_per_chip
    if chip in ("v5e", "v6e"):
        if count == 16 and shape == (4, 4) and max(degrees) == 16:
            return DeviceOrder(_RING_OF_16, (("xy", 16),))
        order = {4: _RING_OF_4, 8: _RING_OF_8}.get(count)
        return DeviceOrder(order, (("xy", count),)) if order else None
    if chip == "v5p" and shape == (2, 2, 2):
        return DeviceOrder(_RING_OF_CUBE, (("xyz", 8),))
    if chip == "tpu7x" and max(shape[:2]) <= 2 and count % 8 == 0 and count <= 32:
        return DeviceOrder(_repeated(count), (("z", count // 8), ("xy", 4), ("core", 2)))
    if chip == "v3":
        if count == 8:
            return DeviceOrder(_repeated(count), (("xy", 4), ("core", 2)))
        order = _repeated(count) if degrees[-1] == 8 else tuple(range(count))
        return DeviceOrder(order, (("y", shape[1]), ("x", shape[0]), ("core", 2)))
    return None


def _repeated(count: int) -> tuple[int, ...]:
    """Return the order of 4 chips of two devices, repeated for every 4 chips."""
    return tuple(start + number for start in range(0, count, 8) for number in _RING_OF_TWO_CORES)
