"""A mesh on a torus: the mesh coordinates that `jax.make_mesh` (JAX 0.10.2) gives each device, and their picture."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from meshwright.description.hardware.fabric import IDLE, MeshPlacement, lay_mesh
from meshwright.description.hardware.system import System
from meshwright.errors import MeshwrightError
from meshwright.pictures.arrays import fills_of, mesh_text
from meshwright.pictures.holdings import Holdings
from meshwright.pictures.panels import Cell, Panel, Sketch, limit_panels

Coordinates = Mapping[str, int]


class Place(NamedTuple):
    """The position of a device on a torus: slice, chip coordinates, number of the device on its chip."""

    slice: int
    x: int
    y: int
    z: int
    core: int


def device_coordinates(layout: MeshPlacement) -> dict[Place, Coordinates]:
    """Return the mesh coordinates of every device of a torus; those of an idle device are empty."""
    order = layout.order
    if order is None:
        return {place: _coordinates(layout, place, _DIMS) for place in _devices(layout.system)}
    # The part of each axis's degree that is inside a slice.
    inside = [piece for piece in layout.pieces if piece.dim != "slice"]
    degrees = {axis: math.prod(piece.size for piece in inside if piece.axis == axis) for axis in layout.degrees}
    positions = list(itertools.product(*map(range, degrees.values())))
    found: dict[Place, Coordinates] = {}
    for number, place in enumerate(_devices(layout.system)):
        outer = _coordinates(layout, place, ("slice",))
        inner = dict(zip(degrees, positions[order.index(number % len(order))], strict=True))
        found[place] = {axis: outer[axis] * degrees[axis] + inner[axis] for axis in degrees}
    return found


_DIMS = ("slice", "x", "y", "z", "core")
"""The dimensions of a fabric. In a mesh axis over several of them, the later ones vary faster."""


def _coordinates(layout: MeshPlacement, place: Place, dims: tuple[str, ...]) -> Coordinates:
    """Return the mesh coordinates that come from some fabric dimensions; empty for an idle device."""
    found = dict.fromkeys([*layout.degrees, IDLE], 0)
    for dim in dims:
        for piece in layout.pieces:
            if piece.dim == dim:
                at = getattr(place, dim) // piece.stride % piece.size
                found[piece.axis] = found[piece.axis] * piece.size + at
    is_idle = found.pop(IDLE) > 0
    return {} if is_idle else found


def _devices(system: System) -> list[Place]:
    """Return the devices in JAX's order: slice by slice, x fastest, the devices of a chip together."""
    x, y, z = (*system.shape, 1, 1)[:3]
    numbers = itertools.product(range(system.num_slices), range(z), range(y), range(x), range(system.devices_per_chip))
    return [Place(number, i, j, k, core) for number, k, j, i, core in numbers]


_IDLE_CHIP = "·"


def torus_sketch(system: System, degrees: Mapping[str, int], holdings: Holdings | None = None) -> Sketch:
    """Draw a mesh on slices of a torus: a panel for each plane of chips, x downwards, y across; wrapping links dotted.

    holdings: the parts of an array on the mesh; each chip has the colour of the shard that it holds. Raises where the
    system has no torus, or the mesh cannot be laid on it.
    """
    if system.chip.torus is None:
        raise MeshwrightError(
            f"{system} has switches between its devices and no torus to draw; try v5e:4x4 or v5p:4x4x4"
        )
    layout = lay_mesh(system, degrees)
    shown = [axis for axis, degree in degrees.items() if degree > 1]
    places = device_coordinates(layout)
    fills = {}
    if holdings is not None:
        shards = fills_of(holdings)
        fills = {tuple(holder.coordinates.values()): shards[holder.block] for holder in holdings.holders}
    rows, columns, planes = (*system.shape, 1)[:3]

    def chip(first: Place) -> Cell:
        """Return a chip with the mesh coordinates of its devices."""
        devices = [places[first._replace(core=core)] for core in range(system.devices_per_chip)]
        texts = [",".join(str(at[axis]) for axis in shown) or "0" if at else _IDLE_CHIP for at in devices]
        said = [" ".join(f"{axis}={at[axis]}" for axis in shown) if at else "idle" for at in devices]
        hint = f"chip x={first.x} y={first.y} z={first.z}: {'; '.join(said)}"
        return Cell("|".join(texts), fills.get(tuple(devices[0][axis] for axis in degrees if devices[0])), hint)

    def plane(number: int, z: int) -> Panel:
        """Return the chips of one plane of one slice."""
        captions = [f"slice {number}"] if system.num_slices > 1 else []
        captions += [f"z={z}"] if system.shape[2:] else []
        return Panel(
            cells=tuple(tuple(chip(Place(number, x, y, z, 0)) for y in range(columns)) for x in range(rows)),
            rows=tuple(f"x={x}" for x in range(rows)),
            columns=tuple(f"y={y}" for y in range(columns)),
            caption=", ".join(captions),
            frame="linked",
            wraps=(system.wraps[0], system.wraps[1]),
        )

    panels = limit_panels([plane(number, z) for number in range(system.num_slices) for z in range(planes)])
    held = "its first device" if system.devices_per_chip > 1 else "it"
    colours = [f"a chip has the colour of the shard that {held} holds"] if fills else []
    title = f"mesh {mesh_text(degrees)} on {system}"
    return Sketch(title=title, panels=panels, notes=(*colours, *_notes(layout, shown)), is_gallery=len(panels) > 1)


def _notes(layout: MeshPlacement, shown: list[str]) -> Iterator[str]:
    """Yield notes: labels, mesh axes, physical axes that wrap, and remarks of lay_mesh."""
    system = layout.system
    if shown:
        cores = ", one for each device of the chip" if system.devices_per_chip > 1 else ""
        yield f"labels are {','.join(shown)}{cores}"
    if layout.order is not None:
        yield "a slice as small as this one JAX lays out by hand, along a ring of neighbours"
    for axis in shown:
        yield f"{axis}: {layout.placement(axis)}"
    wrapped = [name for name, wraps in zip("xyz", system.wraps, strict=False) if wraps]
    closed = "dotted links close " + ", ".join(wrapped) + " into rings" if wrapped else "no axis wraps around"
    yield closed + (" (z from the last plane to the first)" if "z" in wrapped else "")
    yield from layout.notes
