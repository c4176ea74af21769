"""Draw a mesh on a torus, with the mesh coordinates of each device as `jax.make_mesh` (JAX 0.10.2) assigns them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from meshwright.description.hardware.fabric import IDLE, MeshPlacement, lay_mesh
from meshwright.description.hardware.system import System
from meshwright.errors import MeshwrightError
from meshwright.pictures.colours import device_fill
from meshwright.pictures.drawings.arrays import mesh_text
from meshwright.pictures.panels import Cell, Panel, Sketch, limit_panels

Coordinates = Mapping[str, int]


class Place(NamedTuple):
    """The position of a device: its slice, its chip's coordinates on the torus, and its number on the chip (`core`)."""

    slice: int
    x: int
    y: int
    z: int
    core: int


def device_coordinates(layout: MeshPlacement) -> dict[Place, Coordinates]:
    """Return the mesh coordinates of every device of a torus, by the device's position; {} for an idle device."""
    order = layout.order
    if order is None:
        return {place: _coordinates(layout, place, _DIMS) for place in _devices(layout.system)}
    # The part of each axis's degree that is inside a slice.
    inside = [piece for piece in layout.factors if piece.dim != "slice"]
    degrees = {axis: math.prod(piece.size for piece in inside if piece.axis == axis) for axis in layout.degrees}
    positions = list(itertools.product(*map(range, degrees.values())))
    found: dict[Place, Coordinates] = {}
    for number, place in enumerate(_devices(layout.system)):
        outer = _coordinates(layout, place, ("slice",))
        inner = dict(zip(degrees, positions[order.index(number % len(order))], strict=True))
        found[place] = {axis: outer[axis] * degrees[axis] + inner[axis] for axis in degrees}
    return found


_DIMS = ("slice", "x", "y", "z", "core")
"""The physical dimensions of a fabric. Along a mesh axis over several of them, the later ones vary faster."""


def _coordinates(layout: MeshPlacement, place: Place, dims: tuple[str, ...]) -> Coordinates:
    """Return a device's index along each mesh axis, from its position in the physical dimensions `dims` alone.

    With fewer than all of `_DIMS`, the index counts only the parts of the axis that follow `dims`; 0 for an axis that
    follows none of them. {} for an idle device.
    """
    found = dict.fromkeys([*layout.degrees, IDLE], 0)
    for dim in dims:
        for piece in layout.factors:
            if piece.dim == dim:
                at = getattr(place, dim) // piece.stride % piece.size
                found[piece.axis] = found[piece.axis] * piece.size + at
    is_idle = found.pop(IDLE) > 0
    return {} if is_idle else found


def _devices(system: System) -> list[Place]:
    """Return all devices in JAX's order: slice by slice, chips with x fastest, the devices of a chip together."""
    x, y, z = (*system.shape, 1, 1)[:3]
    numbers = itertools.product(range(system.num_slices), range(z), range(y), range(x), range(system.devices_per_chip))
    return [Place(number, i, j, k, core) for number, k, j, i, core in numbers]


_IDLE_CHIP = "·"


def torus_sketch(
    system: System,
    degrees: Mapping[str, int],
    numbers: Mapping[tuple[int, ...], int] | None = None,
    *,
    axes: Collection[str] | None = None,
) -> Sketch:
    """Draw a mesh on slices of a torus: a grid for each plane of chips, with its links; wraparound links are dotted.

    A chip has the numbers of its devices, and the colour of the first. A mesh axis that follows one physical dimension
    labels rows or columns (rows for the first axis, if possible). The coordinates along other axes are shown after a
    device's number.

    Args:
        system: slices of a chip with a torus.
        degrees: the degree of each mesh axis, outermost first.
        numbers: the number of each device, by its mesh coordinates; by default the last axis varies fastest.
        axes: the mesh axes whose links are drawn as used; by default all.

    Raises:
        MeshwrightError: the system has no torus, or the mesh cannot be placed on it.
    """
    if system.chip.torus is None:
        raise MeshwrightError(
            f"{system} has switches between its devices and no torus to draw; try v5e:4x4 or v5p:4x4x4"
        )
    layout = lay_mesh(system, degrees)
    if numbers is None:
        numbers = {at: number for number, at in enumerate(itertools.product(*map(range, degrees.values())))}
    chips = _Chips(layout, device_coordinates(layout), numbers, tuple(degrees if axes is None else axes))
    planes = list(itertools.product(range(system.num_slices), range((*system.shape, 1, 1)[2])))
    panels = limit_panels([chips.panel(number, z) for number, z in planes])
    notes = tuple(chips.notes(axes))
    return Sketch(
        title=f"mesh {mesh_text(degrees)} on {system}", panels=panels, notes=notes, is_gallery=len(panels) > 1
    )


@dataclass(frozen=True)
class _Chips:
    """The chips of a torus, for drawing.

    places: the mesh coordinates of each device. numbers: each device's number, by its mesh coordinates. axes: the mesh
    axes whose links are drawn as used.
    """

    layout: MeshPlacement
    places: Mapping[Place, Coordinates]
    numbers: Mapping[tuple[int, ...], int]
    axes: tuple[str, ...]

    @cached_property
    def shown(self) -> list[str]:
        """The mesh axes of degree above 1."""
        return [axis for axis, degree in self.layout.degrees.items() if degree > 1]

    @cached_property
    def edges(self) -> dict[str, str]:
        """The physical dimension that each mesh axis follows (`_decides`); axes that follow none are left out."""
        dims = ("slice", "x", "y", "z")
        return {axis: dim for axis in self.shown for dim in dims if self._decides(dim, axis)}

    def _decides(self, dim: str, axis: str) -> bool:
        """Whether the coordinate along a mesh axis depends only on the coordinate in the physical dimension `dim`."""
        found: dict[int, set[int]] = {}
        for place, at in self.places.items():
            if at:
                found.setdefault(getattr(place, dim), set()).add(at[axis])
        return all(len(values) == 1 for values in found.values())

    @cached_property
    def beside(self) -> list[str]:
        """The mesh axes that follow no physical dimension, whose coordinates are shown after a device's number.

        Empty if the number is the coordinate along the only axis.
        """
        if len(self.shown) == 1 and list(self.numbers.values()) == list(range(len(self.numbers))):
            return []
        return [axis for axis in self.shown if axis not in self.edges]

    @cached_property
    def is_turned(self) -> bool:
        """Whether y is drawn downwards instead of x: so it is if the first mesh axis that follows x or y follows y."""
        along = [self.edges.get(axis) for axis in self.shown]
        return next((dim == "y" for dim in along if dim in ("x", "y")), False)

    def panel(self, number: int, z: int) -> Panel:
        """Return the grid of the chips in one plane (`z`) of one slice (`number`)."""
        system = self.layout.system
        x_size, y_size = (*system.shape, 1)[:2]
        grid = [[Place(number, x, y, z, 0) for y in range(y_size)] for x in range(x_size)]
        wraps = (system.wraps[0], system.wraps[1])
        down, across = ("y", "x") if self.is_turned else ("x", "y")
        if self.is_turned:
            grid, wraps = [list(line) for line in zip(*grid, strict=True)], (wraps[1], wraps[0])
        captions = [self._edge("slice", grid[0][0])] if system.num_slices > 1 else []
        captions += [self._edge("z", grid[0][0])] if system.shape[2:] else []
        cells = [
            [
                self._chip(
                    place,
                    (
                        self._is_used(place, row[(column + 1) % len(row)], across),
                        self._is_used(place, grid[(line + 1) % len(grid)][column], down),
                    ),
                )
                for column, place in enumerate(row)
            ]
            for line, row in enumerate(grid)
        ]
        return Panel(
            cells=tuple(map(tuple, cells)),
            rows=tuple(self._edge(down, row[0]) for row in grid),
            columns=tuple(self._edge(across, place) for place in grid[0]),
            caption=", ".join(captions),
            frame="linked",
            wraps=wraps,
        )

    def _edge(self, dim: str, place: Place) -> str:
        """Return the label of a chip in a physical dimension: `X=1` for a mesh axis that follows it, else `y=1`."""
        at = self.places[place]
        named = [f"{axis}={at[axis]}" for axis, decides in self.edges.items() if decides == dim and axis in at]
        own = f"{dim} {place.slice}" if dim == "slice" else f"{dim}={getattr(place, dim)}"
        if dim in ("slice", "z") and named:
            return f"{own} ({','.join(named)})"
        return ",".join(named) or own

    def _chip(self, first: Place, links: tuple[bool, bool]) -> Cell:
        """Return the cell of a chip, from its first device: the numbers of its devices, in the first one's colour."""
        system, degrees = self.layout.system, self.layout.degrees
        devices = [self.places[first._replace(core=core)] for core in range(system.devices_per_chip)]
        texts, hints = [], []
        for at in devices:
            if not at:
                texts.append(_IDLE_CHIP)
                hints.append("idle")
                continue
            number = str(self.numbers[tuple(at[axis] for axis in degrees)])
            beside = ",".join(str(at[axis]) for axis in self.beside)
            texts.append(f"{number}:{beside}" if beside else number)
            hints.append(f"device {number} {' '.join(f'{axis}={at[axis]}' for axis in self.shown)}".rstrip())
        hint = f"chip x={first.x} y={first.y} z={first.z}: {'; '.join(hints)}"
        return Cell("|".join(texts), device_fill(devices[0], degrees) if devices[0] else None, hint, links=links)

    @cached_property
    def far(self) -> frozenset[str]:
        """The mesh axes with neighbours that are not on neighbouring chips, so that data passes through other chips."""
        if self.layout.order is None:
            return frozenset()
        chips = {tuple(at.values()): place for place, at in self.places.items() if at}
        sizes = (*self.layout.system.shape, 1, 1)[:3]
        found: set[str] = set()
        for at, place in chips.items():
            for index, axis in enumerate(self.layout.degrees):
                after = chips.get((*at[:index], at[index] + 1, *at[index + 1 :]), place)
                hops = [abs(one - two) for one, two in zip(place[1:4], after[1:4], strict=True)]
                if sum(min(hop, size - hop) for hop, size in zip(hops, sizes, strict=True)) > 1:
                    found.add(axis)
        return frozenset(found)

    def _is_used(self, first: Place, second: Place, dim: str) -> bool:
        """Whether one of `axes` uses the link between two chips, given by their first devices, adjacent along `dim`."""
        at, to = self.places[first], self.places[second]
        if not at or not to or first == second:
            return False
        pieces = [p for p in self.layout.factors if p.dim == dim and p.axis in self.axes and p.size > 1]
        if self.far & set(self.axes) or any(piece.stride > 1 for piece in pieces):
            return True  # Chips between neighbours of the axis hand its bytes on.
        differ = [axis for axis in at if at[axis] != to[axis]]
        if len(differ) != 1 or differ[0] not in self.axes:
            return False
        (axis,) = differ
        is_step = (at[axis] - to[axis]) % self.layout.degrees[axis] in (1, self.layout.degrees[axis] - 1)
        return is_step or axis in [piece.axis for piece in pieces]

    def notes(self, asked: Collection[str] | None) -> Iterator[str]:
        """Yield notes on cells, colours, mesh axes and links, and the notes of the layout.

        asked: the axes whose links are drawn as used; None for all.
        """
        system, layout = self.layout.system, self.layout
        cores = ", one for each device of the chip" if system.devices_per_chip > 1 else ""
        beside = f" and, behind it, its {','.join(self.beside)}" if self.beside else ""
        yield f"in a chip: the device's number{beside}{cores}"
        if self.shown:
            first, *others = self.shown
            yield f"hue: {first}" + (f"; lightness: {', '.join(others)}" if others else "")
        if layout.order is not None:
            yield "a slice as small as this one JAX lays out by hand, along a ring of neighbours"
        for axis in self.shown:
            if asked is None or axis in asked:
                yield f"{axis}: {layout.placement(axis)}"
        if asked is not None:
            yield f"lines are the links of {', '.join(asked)}; other links are faint"
        wrapped = [name for name, wraps in zip("xyz", system.wraps, strict=False) if wraps]
        closed = "dotted links close " + ", ".join(wrapped) + " into rings" if wrapped else "no axis wraps around"
        yield closed + (" (z from the last plane to the first)" if "z" in wrapped else "")
        yield from layout.notes
