"""The picture of a mesh laid on a torus: the chips where they stand, labelled with their mesh coordinates."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from meshwright.errors import MeshwrightError
from meshwright.hardware import MeshPlacement, System, lay_mesh
from meshwright.viz.grid import mesh_text
from meshwright.viz.positions import Coordinates, Place, device_coordinates
from meshwright.viz.sketch import Cell, Panel, Sketch, limit_panels

_IDLE_CHIP = "·"


def torus_sketch(system: System, degrees: Mapping[str, int]) -> Sketch:
    """A mesh on slices of a torus: a panel for every plane of chips, x downwards and y across; links that wrap dotted.

    Raises where the system has no torus, or the mesh cannot be laid on it.
    """
    if system.chip.torus is None:
        raise MeshwrightError(
            f"{system} has switches between its devices and no torus to draw; try v5e:4x4 or v5p:4x4x4"
        )
    layout = lay_mesh(system, degrees)
    shown = [axis for axis, degree in degrees.items() if degree > 1]
    places = device_coordinates(layout)
    numbers = [(at, z) for at in range(system.num_slices) for z in range(math.prod(system.shape[2:]))]
    panels = limit_panels([_plane(layout, places, shown, *number) for number in numbers])
    title = f"mesh {mesh_text(degrees)} on {system}"
    return Sketch(title=title, panels=panels, notes=tuple(_notes(layout, shown)), is_gallery=len(panels) > 1)


def _plane(layout: MeshPlacement, places: Mapping[Place, Coordinates], shown: list[str], number: int, z: int) -> Panel:
    """The chips of one plane of one slice."""
    system = layout.system
    rows, columns = system.shape[:2]
    down, across = system.wraps[:2]
    captions = [f"slice {number}"] if system.num_slices > 1 else []
    captions += [f"z={z}"] if system.shape[2:] else []
    return Panel(
        cells=tuple(
            tuple(_chip(layout, places, shown, Place(number, x, y, z, 0)) for y in range(columns)) for x in range(rows)
        ),
        rows=tuple(f"x={x}" for x in range(rows)),
        columns=tuple(f"y={y}" for y in range(columns)),
        caption=", ".join(captions),
        frame="linked",
        wraps=(down, across),
    )


def _chip(layout: MeshPlacement, places: Mapping[Place, Coordinates], shown: list[str], first: Place) -> Cell:
    """One chip with the coordinates of its devices, coloured by the first mesh axis."""
    devices = [places[first._replace(core=core)] for core in range(layout.system.devices_per_chip)]
    texts = [",".join(str(device[axis]) for axis in shown) or "0" if device else _IDLE_CHIP for device in devices]
    where = f"chip x={first.x} y={first.y} z={first.z}"
    said = [" ".join(f"{axis}={device[axis]}" for axis in shown) if device else "idle" for device in devices]
    colour = devices[0][shown[0]] if devices[0] and shown else None
    return Cell("|".join(texts), colour, f"{where}: {'; '.join(said)}")


def _notes(layout: MeshPlacement, shown: list[str]) -> Iterator[str]:
    """What the labels mean, what each mesh axis runs over, which physical axes wrap, and what lay_mesh has to say."""
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
