"""JAX's hard-coded device orders for small slices. They follow a ring of neighbours, whatever the mesh.

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
    """The JAX ids of a slice's devices in the order of the mesh.

    dims: name and size of each dimension of that order, outermost first. `xy` and `xyz` are single rings of neighbours
    that run through these physical axes.
    """

    order: tuple[int, ...]
    dims: tuple[tuple[str, int], ...]


def jax_device_order(system: System, degrees: tuple[int, ...]) -> DeviceOrder | None:
    """Return JAX's hard-coded order for a mesh of all devices of a slice; None if JAX maps the mesh onto the torus.

    JAX orders the devices of v5e:2x4 by the ring of a 4x2 slice. A 2x4 slice has a ring too, so this order
    counts as a ring.

    degrees: degrees of the mesh axes inside a slice, outermost first.
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
    """Return the order of `count` devices: that of 4 chips with two devices each, repeated for every 4 chips."""
    return tuple(start + number for start in range(0, count, 8) for number in _RING_OF_TWO_CORES)
