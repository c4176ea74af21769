"""Place a mesh on a fabric: the links of each mesh axis, and how many groups of devices share them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from meshwright.description.hardware.assign import assign
from meshwright.description.hardware.chip import Torus
from meshwright.description.hardware.jax_device_order import jax_device_order
from meshwright.description.hardware.slices import across_slices, within_slice
from meshwright.description.hardware.system import System, units_of
from meshwright.errors import MeshwrightError
from meshwright.units import show_degrees, show_mesh

IDLE = "(idle)"
"""Name of the pseudo-axis over the devices that a smaller mesh leaves idle. Outermost, so that the mesh is compact."""

_SLICE, _CORE, _DEVICE = "slice", "core", "device"
_PHYSICAL = "xyz"


@dataclass(frozen=True)
class Ring:
    """A ring or line on one physical axis of a torus: `size` chips, every `stride`-th.

    link_bytes_per_second: one way; if interleaved groups of devices share a link, one group's part.
    """

    axis: str
    size: int
    stride: int
    is_wrapped: bool
    link_bytes_per_second: float

    def __str__(self) -> str:
        """For display: `x: ring of 4`, `y: line of 2, every 4th chip`."""
        apart = f", every {self.stride}{ {2: 'nd', 3: 'rd'}.get(self.stride, 'th') } chip" if self.stride > 1 else ""
        return f"{self.axis}: {'ring' if self.is_wrapped else 'line'} of {self.size}{apart}"


@dataclass(frozen=True)
class Crossing:
    """A level of switches (or the data-centre network, or the link inside a chip) that a group of devices crosses.

    The level connects units: devices, nodes, scalable units, slices.

    Attributes:
        degree: number of units that the group is in.
        members: number of the group's devices in each unit.
        sharers: number of groups that share the same links.
        link_bytes_per_second: one way, of the whole link of one unit.
    """

    level: str
    degree: int
    members: int
    sharers: int
    link_bytes_per_second: float
    hop_seconds: float

    def __str__(self) -> str:
        """For display: `leaf: 4 units, 8 groups share each link`."""
        shared = f", {self.sharers} groups share each link" if self.sharers > 1 else ""
        return f"{self.level}: {self.degree} units{shared}"


@dataclass(frozen=True)
class Placement:
    """The links of a collective over one mesh axis, or several together.

    Attributes:
        rings: rings on physical axes of the torus, innermost first.
        crossings: crossings of switched levels, innermost first.
        chip_members: number of a group's devices in one chip.
        is_split: whether bandwidth is lost because mesh axes share a physical axis (on switches: groups straddle units
            unevenly).
    """

    axes: tuple[str, ...]
    degree: int
    rings: tuple[Ring, ...]
    crossings: tuple[Crossing, ...]
    chip_members: int
    hop_seconds: float
    is_split: bool

    def __str__(self) -> str:
        """For display: `ICI x: ring of 4; DCN: 2 units, 4 groups share each link`."""
        parts = [f"ICI {ring}" for ring in self.rings] + [str(crossing) for crossing in self.crossings]
        return "; ".join(parts) or "inside one device"


@dataclass(frozen=True)
class AxisFactor:
    """The part of a fabric's dimension that a mesh axis uses: `size` steps of `stride`."""

    axis: str
    dim: str
    size: int
    stride: int


@dataclass(frozen=True, eq=False)
class MeshPlacement:
    """A mesh placed on a system.

    notes: messages for users, on idle devices and split axes. order: JAX's hard-coded device order of a slice, if any.
    """

    system: System
    degrees: Mapping[str, int]
    pieces: tuple[AxisFactor, ...]
    is_split: bool
    notes: tuple[str, ...]
    order: tuple[int, ...] | None = None

    @property
    def is_refused(self) -> bool:
        """Whether `jax.make_mesh` refuses the mesh: it splits physical axes, on a chip where JAX does not allow it."""
        torus = self.system.chip.torus
        return torus is not None and self.is_split and not torus.splits_axes

    def placement(self, axes: str | tuple[str, ...]) -> Placement:
        """Return the links of a collective over one mesh axis, or several together.

        Raises:
            MeshwrightError: an axis is not on the mesh.
        """
        names = (axes,) if isinstance(axes, str) else tuple(axes)
        for name in names:
            if name not in self.degrees:
                raise MeshwrightError(f"axis {name!r} is not on the mesh; its axes are {', '.join(self.degrees)}")
        return _placement(self, names)


@lru_cache(maxsize=1 << 15)
def _placement(layout: MeshPlacement, names: tuple[str, ...]) -> Placement:
    """Return `MeshPlacement.placement`, cached for the search."""
    pieces = [piece for piece in layout.pieces if piece.axis in names]
    if layout.system.chip.torus:
        return _on_torus(layout, layout.system.chip.torus, names, pieces)
    return _on_switches(layout.system, names, pieces)


def lay_mesh(system: System, degrees: Mapping[str, int]) -> MeshPlacement:
    """Place a mesh on a system.

    On a torus each mesh axis gets whole physical axes if `jax.make_mesh` finds any, and the outermost axes cross
    slices; on switches the innermost axes fill a node first. A mesh smaller than the system leaves the rest idle.
    Raises if the number of devices is not a multiple of the mesh's.

    Args:
        degrees: degree of every mesh axis, outermost first (`MeshShape.layout`).
    """
    return _lay_mesh(system, tuple(degrees.items()))


@lru_cache(maxsize=1 << 14)
def _lay_mesh(system: System, items: tuple[tuple[str, int], ...]) -> MeshPlacement:
    """Place a mesh, given hashable arguments: equal meshes share one placement and its cached figures."""
    degrees = dict(items)
    used = math.prod(degrees.values())
    if system.num_devices % used:
        raise MeshwrightError(
            f"mesh {show_mesh(degrees)} has {used} devices, {system} {system.num_devices};"
            f" the mesh must use all of them or an even share"
        )
    idle = system.num_devices // used
    all_degrees = {IDLE: idle, **degrees} if idle > 1 else dict(degrees)
    notes = [f"{system.num_devices - used} of {system.num_devices} devices are idle"] if idle > 1 else []
    torus = system.chip.torus
    if torus is None:
        pieces = tuple(_nested(list(all_degrees.items()), _DEVICE))
        return MeshPlacement(system, degrees, pieces, False, tuple(notes))
    pieces, is_split, order = _torus_pieces(system, all_degrees)
    for piece in pieces:
        if piece.dim == _SLICE and (axis := piece.axis) != IDLE:
            # Gradients (dp) and stages (pp) communicate least.
            instead = f"; dp={piece.size} or pp={piece.size} would keep {axis} inside slices"
            advice = "" if axis in ("dp", "pp") else instead
            notes.append(f"{axis} runs over {piece.size} slices, on the data-centre network{advice}")
    if is_split:
        advice = "" if torus.splits_axes else "; jax.make_mesh refuses it (mesh_utils has allow_split_physical_axes)"
        mesh = show_degrees(degrees)
        notes.append(
            f"{mesh} does not take whole physical axes of {system}, so links are shared and some rings open{advice}"
        )
    return MeshPlacement(system, degrees, pieces, is_split, tuple(notes), order)


def _torus_pieces(
    system: System, degrees: Mapping[str, int]
) -> tuple[tuple[AxisFactor, ...], bool, tuple[int, ...] | None]:
    """Return the pieces of every mesh axis on a torus, whether an axis is split, and JAX's hard-coded device order."""
    inside = within_slice(degrees, system.num_slices)
    outer = _nested(list(across_slices(degrees, system.num_slices).items()), _SLICE)
    known = None if IDLE in degrees else jax_device_order(system, tuple(inside.values()))
    if known:
        return (*outer, *_in_order(known.dims, inside)), False, known.order
    cores = {_CORE: system.devices_per_chip} if system.devices_per_chip > 1 else {}
    # The devices of a chip come last, as in the device order of JAX.
    sizes = {_PHYSICAL[i]: size for i, size in enumerate(system.shape) if size > 1} | cores
    parts, is_split = assign(tuple(sizes.values()), tuple(inside.values()))
    pieces = outer
    for index, dim in enumerate(sizes):
        pieces += _nested([(axis, part[index]) for axis, part in zip(inside, parts, strict=True)], dim)
    return tuple(pieces), is_split, None


def _in_order(dims: tuple[tuple[str, int], ...], degrees: Mapping[str, int]) -> list[AxisFactor]:
    """Return the pieces of mesh axes that fill dims in order: the innermost axis takes the innermost dim first."""
    free, pieces = [(dim, size, 1) for dim, size in dims], []
    for axis, degree in reversed(list(degrees.items())):
        while degree > 1:
            dim, left, stride = free.pop()
            taken = math.gcd(degree, left)
            if taken > 1:
                pieces.append(AxisFactor(axis, dim, taken, stride))
            if taken < left:
                free.append((dim, left // taken, stride * taken))
            degree //= taken
    return pieces


def _nested(parts: list[tuple[str, int]], dim: str) -> list[AxisFactor]:
    """Return the pieces of one dimension. parts: axis and size, outermost first; the innermost has stride 1."""
    pieces, stride = [], 1
    for axis, size in reversed(parts):
        if size > 1:
            pieces.append(AxisFactor(axis, dim, size, stride))
        stride *= size
    return pieces


def _on_torus(layout: MeshPlacement, torus: Torus, names: tuple[str, ...], pieces: list[AxisFactor]) -> Placement:
    system = layout.system
    slices, cores = (math.prod(p.size for p in pieces if p.dim == dim) for dim in (_SLICE, _CORE))
    degree = math.prod(piece.size for piece in pieces)
    rings = _rings(layout, torus, pieces, system.devices_per_chip // cores)
    crossings = []
    if cores > 1:
        link = torus.core_bytes_per_second or torus.link_bytes_per_second
        crossings.append(Crossing("chip", cores, 1, 1, link, torus.hop_seconds))
    if slices > 1 and system.chip.dcn:
        chips = math.prod(system.shape)
        members = degree // slices
        sharers = chips * system.devices_per_chip // members
        egress, hop = system.chip.dcn.bytes_per_second * chips, system.chip.dcn.hop_seconds
        crossings.append(Crossing("DCN", slices, members, sharers, egress, hop))
    is_split = any(ring.size != _size(layout, ring.axis) for ring in rings)
    return Placement(names, degree, rings, tuple(crossings), cores, torus.hop_seconds, is_split)


def _rings(layout: MeshPlacement, torus: Torus, pieces: list[AxisFactor], sharers: int) -> tuple[Ring, ...]:
    """Return the rings of pieces on physical axes and on JAX's hard-coded rings, contiguous pieces joined."""
    # Hard-coded orders are closed rings of neighbours.
    closes = dict(zip(_PHYSICAL, layout.system.wraps, strict=False)) | {"xy": True, "xyz": True}
    rings = []
    for dim, wraps in closes.items():
        for stride, length in _joined([piece for piece in pieces if piece.dim == dim]):
            # Groups that interleave on an axis share its links.
            link = torus.link_bytes_per_second / (stride * sharers)
            rings.append(Ring(dim, length, stride, wraps and stride * length == _size(layout, dim), link))
    return tuple(rings)


def _size(layout: MeshPlacement, dim: str) -> int:
    """Return the size of a dimension of the fabric: the product of its pieces' sizes, `IDLE` included."""
    return math.prod(piece.size for piece in layout.pieces if piece.dim == dim)


def _joined(pieces: list[AxisFactor]) -> list[tuple[int, int]]:
    """Return the (stride, size) of the pieces of one dimension, contiguous ones joined."""
    strides: list[tuple[int, int]] = []
    for piece in sorted(pieces, key=lambda piece: piece.stride):
        if strides and math.prod(strides[-1]) == piece.stride:
            stride, size = strides.pop()
            strides.append((stride, size * piece.size))
        else:
            strides.append((piece.stride, piece.size))
    return strides


def _on_switches(system: System, names: tuple[str, ...], pieces: list[AxisFactor]) -> Placement:
    chip, total = system.chip, system.num_devices
    degree = math.prod(piece.size for piece in pieces)
    strides = _joined(pieces)
    crossings, below, members, is_split = [], 1, 1, False
    used = units_of(chip, total)
    for index, level in enumerate(chip.levels):
        fills = used if index == 0 else below * level.degree
        above = total if index == len(chip.levels) - 1 else min(fills, total)
        inside, even = _members(strides, above)
        is_split |= not even
        if inside > members:
            link = level.link_bytes_per_second
            # Each device has its own network card: a partly used node has part of the bandwidth.
            link *= used / chip.levels[0].degree if index == 1 else 1
            link /= total if chip.is_shared else 1
            crossings.append(
                Crossing(level.name, inside // members, members, below // members, link, level.hop_seconds)
            )
        below, members = above, inside
    return Placement(names, degree, (), tuple(crossings), 1, 0.0, is_split)


def _members(strides: list[tuple[int, int]], block: int) -> tuple[int, bool]:
    """Return a group's number of devices in a block of neighbours, and whether it is the same everywhere.

    If groups differ, the number of the worst group is returned.
    """
    inside, even = 1, True
    for stride, size in strides:
        if stride >= block:
            continue
        steps = block // stride if block % stride == 0 else 1
        held = math.gcd(size, steps)
        even &= held in (size, steps) and block % stride == 0
        inside *= held
    return inside, even
