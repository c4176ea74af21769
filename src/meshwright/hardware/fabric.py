"""What a mesh axis laid on a fabric can carry: the links it runs over, and who else runs over them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from meshwright.errors import MeshwrightError
from meshwright.hardware.assign import assign
from meshwright.hardware.chip import Torus
from meshwright.hardware.system import System, units_of

IDLE = "(idle)"
"""The axis that stands for the devices a smaller mesh leaves idle: outermost, as the mesh takes neighbours."""

_SLICE, _CORE, _DEVICE = "slice", "core", "device"
_PHYSICAL = "xyz"


@dataclass(frozen=True)
class Ring:
    """A stretch of one physical axis of a torus: `size` chips, every `stride`-th, closing into a ring or not.

    link_bytes_per_second: one way, of the share of a link that one group of devices has, where others run beside it.
    """

    axis: str
    size: int
    stride: int
    is_wrapped: bool
    link_bytes_per_second: float

    def __str__(self) -> str:
        """The stretch in words: `x: ring of 4`, `y: line of 2, every 4th chip`."""
        apart = f", every {self.stride}{ {2: 'nd', 3: 'rd'}.get(self.stride, 'th') } chip" if self.stride > 1 else ""
        return f"{self.axis}: {'ring' if self.is_wrapped else 'line'} of {self.size}{apart}"


@dataclass(frozen=True)
class Crossing:
    """A level of switches (or the data-centre network, or the link inside a chip) that a group of devices crosses.

    Below the level stand units: devices, nodes, scalable units, slices. The group touches `degree` units, in each
    `members` devices; `sharers` groups like it run over the same links, and link_bytes_per_second is one way, of the
    whole link of one unit.
    """

    level: str
    degree: int
    members: int
    sharers: int
    link_bytes_per_second: float
    hop_seconds: float

    def __str__(self) -> str:
        """The crossing in words: `leaf: 4 units, 8 groups share each link`."""
        shared = f", {self.sharers} groups share each link" if self.sharers > 1 else ""
        return f"{self.level}: {self.degree} units{shared}"


@dataclass(frozen=True)
class Placement:
    """How one mesh axis, or several taken together, lies on the fabric: what a collective over them runs through.

    rings: the physical axes of the torus, innermost first; crossings: the switched levels, innermost first.
    chip_members: the devices of a group in one chip. is_split: a physical axis (a node) is shared between mesh axes
    (groups) in parts, which costs bandwidth.
    """

    axes: tuple[str, ...]
    degree: int
    rings: tuple[Ring, ...]
    crossings: tuple[Crossing, ...]
    chip_members: int
    hop_seconds: float
    is_split: bool

    def __str__(self) -> str:
        """The placement in words: `ICI x: ring of 4; DCN: 2 units, 4 groups share each link`."""
        parts = [f"ICI {ring}" for ring in self.rings] + [str(crossing) for crossing in self.crossings]
        return "; ".join(parts) or "inside one device"


@dataclass(frozen=True)
class Piece:
    """The part of a fabric's dimension that a mesh axis takes: `size` steps of `stride`."""

    axis: str
    dim: str
    size: int
    stride: int


@dataclass(frozen=True)
class Layout:
    """A mesh laid on a system. `notes` say in words what a person should know: idle devices, axes that are split."""

    system: System
    degrees: Mapping[str, int] = field(hash=False)
    pieces: tuple[Piece, ...]
    is_split: bool
    notes: tuple[str, ...]

    def placement(self, axes: str | tuple[str, ...]) -> Placement:
        """The placement of one mesh axis, or of several together, on which a collective over them runs."""
        names = (axes,) if isinstance(axes, str) else tuple(axes)
        for name in names:
            if name not in self.degrees:
                raise MeshwrightError(f"axis {name!r} is not on the mesh; its axes are {', '.join(self.degrees)}")
        pieces = [piece for piece in self.pieces if piece.axis in names]
        if self.system.chip.torus:
            return _on_torus(self.system, self.system.chip.torus, names, pieces)
        return _on_switches(self.system, names, pieces)


def lay_mesh(system: System, degrees: Mapping[str, int]) -> Layout:
    """The mesh laid on the system; `degrees` name the mesh axes outermost first (`MeshShape.layout`).

    On a torus each mesh axis takes whole physical axes where `jax.make_mesh` finds them, and the outermost axes run
    over the slices; on switches the innermost axes fill a node first. A mesh smaller than the system leaves the rest
    idle. Raises where the number of devices is not a multiple of the mesh's.
    """
    used = math.prod(degrees.values())
    if system.num_devices % used:
        mesh = ",".join(f"{axis}={degree}" for axis, degree in degrees.items())
        raise MeshwrightError(
            f"mesh {mesh} has {used} devices, {system} {system.num_devices};"
            f" the mesh must use all of them or an even share"
        )
    idle = system.num_devices // used
    all_degrees = {IDLE: idle, **degrees} if idle > 1 else dict(degrees)
    notes = [f"{system.num_devices - used} of {system.num_devices} devices are idle"] if idle > 1 else []
    torus = system.chip.torus
    if torus is None:
        pieces = tuple(_nested(list(all_degrees.items()), _DEVICE))
        return Layout(system, degrees, pieces, False, tuple(notes))
    pieces, is_split = _torus_pieces(system, all_degrees)
    over_slices = [piece for piece in pieces if piece.dim == _SLICE and piece.axis != IDLE]
    notes += [f"{piece.axis} runs over {piece.size} slices, on the data-centre network" for piece in over_slices]
    if is_split:
        notes.append(_split_note(system, torus, degrees))
    return Layout(system, degrees, pieces, is_split, tuple(notes))


def _split_note(system: System, torus: Torus, degrees: Mapping[str, int]) -> str:
    """What is said of a mesh that splits physical axes."""
    mesh = ",".join(f"{axis}={degree}" for axis, degree in degrees.items() if degree > 1)
    # On up to 8 chips JAX 0.10.2 numbers the devices along a ring and takes any mesh.
    is_taken = torus.splits_axes or system.num_chips <= 8
    advice = "" if is_taken else "; jax.make_mesh refuses it (mesh_utils has allow_split_physical_axes)"
    return f"{mesh} does not take whole physical axes of {system}, so links are shared and some rings open{advice}"


def _torus_pieces(system: System, degrees: Mapping[str, int]) -> tuple[tuple[Piece, ...], bool]:
    """The pieces of every mesh axis on slices, physical axes and the devices of a chip; and whether one is split."""
    over_slices, inside = _divide_slices(system, degrees)
    cores = {_CORE: system.devices_per_chip} if system.devices_per_chip > 1 else {}
    # The devices of a chip come last, as in the device order of JAX.
    sizes = {_PHYSICAL[i]: size for i, size in enumerate(system.shape) if size > 1} | cores
    parts, is_split = assign(tuple(sizes.values()), tuple(inside.values()))
    pieces = list(_nested(list(over_slices.items()), _SLICE))
    for index, dim in enumerate(sizes):
        pieces += _nested([(axis, part[index]) for axis, part in zip(inside, parts, strict=True)], dim)
    return tuple(pieces), is_split


def _divide_slices(system: System, degrees: Mapping[str, int]) -> tuple[dict[str, int], dict[str, int]]:
    """Each axis's degree over the slices and inside one; the outermost axes take the slices, they speak least."""
    left, over, inside = system.num_slices, {}, {}
    for axis, degree in degrees.items():
        over[axis] = math.gcd(degree, left)
        inside[axis] = degree // over[axis]
        left //= over[axis]
    return over, inside


def _nested(parts: list[tuple[str, int]], dim: str) -> list[Piece]:
    """The pieces of one dimension, of axes given outermost first: the innermost has stride 1."""
    pieces, stride = [], 1
    for axis, size in reversed(parts):
        if size > 1:
            pieces.append(Piece(axis, dim, size, stride))
        stride *= size
    return pieces


def _on_torus(system: System, torus: Torus, names: tuple[str, ...], pieces: list[Piece]) -> Placement:
    """The placement of some mesh axes on slices of a torus."""
    slices, cores = (math.prod(p.size for p in pieces if p.dim == dim) for dim in (_SLICE, _CORE))
    degree = math.prod(piece.size for piece in pieces)
    on_chip_sharers = system.devices_per_chip // cores
    rings = _rings(system, torus, pieces, on_chip_sharers)
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
    sizes = dict(zip(_PHYSICAL, system.shape, strict=False))
    is_split = any(ring.size != sizes[ring.axis] for ring in rings)
    return Placement(names, degree, rings, tuple(crossings), cores, torus.hop_seconds, is_split)


def _rings(system: System, torus: Torus, pieces: list[Piece], sharers: int) -> tuple[Ring, ...]:
    """The stretches of physical axes that pieces make, those that continue each other joined."""
    rings = []
    for dim, size, wraps in zip(_PHYSICAL, system.shape, system.wraps, strict=False):
        for stride, length in _joined([piece for piece in pieces if piece.dim == dim]):
            # Groups that interleave on an axis share its links, so each has its part of them.
            link = torus.link_bytes_per_second / (stride * sharers)
            rings.append(Ring(dim, length, stride, wraps and stride * length == size, link))
    return tuple(rings)


def _joined(pieces: list[Piece]) -> list[tuple[int, int]]:
    """The stride and size of the stretches that pieces of one dimension make, those that continue each other joined."""
    stretches: list[tuple[int, int]] = []
    for piece in sorted(pieces, key=lambda piece: piece.stride):
        if stretches and math.prod(stretches[-1]) == piece.stride:
            stride, size = stretches.pop()
            stretches.append((stride, size * piece.size))
        else:
            stretches.append((piece.stride, piece.size))
    return stretches


def _on_switches(system: System, names: tuple[str, ...], pieces: list[Piece]) -> Placement:
    """The placement of some mesh axes on levels of switches."""
    chip, total = system.chip, system.num_devices
    degree = math.prod(piece.size for piece in pieces)
    stretches = _joined(pieces)
    crossings, below, members, is_split = [], 1, 1, False
    used = units_of(chip, total)
    for index, level in enumerate(chip.levels):
        fills = used if index == 0 else below * level.degree
        above = total if index == len(chip.levels) - 1 else min(fills, total)
        inside, even = _members(stretches, above)
        is_split |= not even
        if inside > members:
            link = level.link_bytes_per_second
            # Every device brings its own network card, so a node used in part sends in part.
            link *= used / chip.levels[0].degree if index == 1 else 1
            link /= total if chip.is_shared else 1
            crossings.append(
                Crossing(level.name, inside // members, members, below // members, link, level.hop_seconds)
            )
        below, members = above, inside
    return Placement(names, degree, (), tuple(crossings), 1, 0.0, is_split)


def _members(stretches: list[tuple[int, int]], block: int) -> tuple[int, bool]:
    """The devices of a group among `block` neighbours, and whether every group has as many in every block it touches.

    Where groups straddle blocks unevenly, the count is what the worst group is sure of: the costlier reading.
    """
    inside, even = 1, True
    for stride, size in stretches:
        if stride >= block:
            continue
        steps = block // stride if block % stride == 0 else 1
        held = math.gcd(size, steps)
        even &= held in (size, steps) and block % stride == 0
        inside *= held
    return inside, even
