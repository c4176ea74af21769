"""Place a mesh on hardware: find the links of each mesh axis, and how many groups of devices share them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from meshwright.description.hardware.assign import assign
from meshwright.description.hardware.chip import Torus
from meshwright.description.hardware.jax_device_order import jax_device_order
from meshwright.description.hardware.slices import across_slices, within_slice
from meshwright.description.hardware.system import System, devices_per_node
from meshwright.errors import MeshwrightError
from meshwright.units import show_degrees, show_mesh

IDLE = "(idle)"
"""Name of an extra mesh axis over devices that a mesh leaves idle; outermost, so that used devices are adjacent."""

_SLICE, _CORE, _DEVICE = "slice", "core", "device"
_PHYSICAL = "xyz"


@dataclass(frozen=True)
class Ring:
    """A ring or a line of `size` chips on one physical axis of a torus: every `stride`-th chip of the axis.

    link_bytes_per_second: bandwidth one way; if several interleaved rings share each link, the share of one ring.
    """

    axis: str
    size: int
    stride: int
    is_wrapped: bool
    link_bytes_per_second: float

    def __str__(self) -> str:
        """Return text for display: `x: ring of 4`, `y: line of 2, every 4th chip`."""
        apart = f", every {self.stride}{ {2: 'nd', 3: 'rd'}.get(self.stride, 'th') } chip" if self.stride > 1 else ""
        return f"{self.axis}: {'ring' if self.is_wrapped else 'line'} of {self.size}{apart}"


@dataclass(frozen=True)
class Crossing:
    """A level of the network that the device group of a collective crosses.

    The level is one of switches, the data-centre network, or the link inside a chip. It connects units: devices, nodes,
    scalable units or slices.

    Attributes:
        level: the name of the level.
        degree: number of units that have devices of the group.
        members: number of the group's devices in each of those units.
        sharers: number of groups that share the same links.
        link_bytes_per_second: bandwidth of the link between one unit and the level, one way, before it is shared.
        hop_seconds: latency of crossing the level once.
    """

    level: str
    degree: int
    members: int
    sharers: int
    link_bytes_per_second: float
    hop_seconds: float

    def __str__(self) -> str:
        """Return text for display: `leaf: 4 units, 8 groups share each link`."""
        shared = f", {self.sharers} groups share each link" if self.sharers > 1 else ""
        return f"{self.level}: {self.degree} units{shared}"


@dataclass(frozen=True)
class Placement:
    """The links of a collective over one mesh axis, or over several axes together.

    Attributes:
        axes: the mesh axes.
        degree: number of devices in each group of the collective.
        rings: one for each physical axis of the torus that the group extends along, innermost first.
        crossings: one for each other level of the network that the group crosses, innermost first.
        chip_members: number of a group's devices in one chip.
        hop_seconds: latency of one link of the torus; 0 on switches.
        is_split: whether bandwidth is lost because mesh axes share a physical axis (on switches: because groups have
            different numbers of devices in the units).
    """

    axes: tuple[str, ...]
    degree: int
    rings: tuple[Ring, ...]
    crossings: tuple[Crossing, ...]
    chip_members: int
    hop_seconds: float
    is_split: bool

    def __str__(self) -> str:
        """Return text for display: `ICI x: ring of 4; DCN: 2 units, 4 groups share each link`."""
        parts = [f"ICI {ring}" for ring in self.rings] + [str(crossing) for crossing in self.crossings]
        return "; ".join(parts) or "inside one device"


@dataclass(frozen=True)
class AxisFactor:
    """The part of a physical dimension `dim` that a mesh axis uses: `size` positions, `stride` apart."""

    axis: str
    dim: str
    size: int
    stride: int


@dataclass(frozen=True, eq=False)
class MeshPlacement:
    """A mesh placed on a system.

    Attributes:
        degrees: the degree of every mesh axis, outermost first.
        factors: the parts of physical dimensions that each mesh axis uses.
        is_split: whether mesh axes share a physical axis.
        notes: messages for users about idle devices and split axes.
        order: JAX's hard-coded device order of a slice; None if it has none for this mesh.
    """

    system: System
    degrees: Mapping[str, int]
    factors: tuple[AxisFactor, ...]
    is_split: bool
    notes: tuple[str, ...]
    order: tuple[int, ...] | None = None

    @property
    def is_refused(self) -> bool:
        """Whether `jax.make_mesh` refuses the mesh: it splits physical axes, on a chip where JAX does not allow it."""
        torus = self.system.chip.torus
        return torus is not None and self.is_split and not torus.splits_axes

    def placement(self, axes: str | tuple[str, ...]) -> Placement:
        """Return the links of a collective over one mesh axis, or over several axes together.

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
    """Return the links of a collective over some mesh axes (`MeshPlacement.placement`), cached for the search."""
    factors = [factor for factor in layout.factors if factor.axis in names]
    if layout.system.chip.torus:
        return _on_torus(layout, layout.system.chip.torus, names, factors)
    return _on_switches(layout.system, names, factors)


def lay_mesh(system: System, degrees: Mapping[str, int]) -> MeshPlacement:
    """Place a mesh on a system.

    On a torus each mesh axis gets whole physical axes if `jax.make_mesh` finds any, and the outermost axes cross
    slices. On switches the innermost axes fill a node first. A mesh may use only a part of the devices; the rest is
    idle. Raises unless the mesh's number of devices divides the system's.

    Args:
        degrees: degree of every mesh axis, outermost first (`MeshShape.layout`).
    """
    return _lay_mesh(system, tuple(degrees.items()))


@lru_cache(maxsize=1 << 14)
def _lay_mesh(system: System, items: tuple[tuple[str, int], ...]) -> MeshPlacement:
    """Return the result of `lay_mesh`, cached. items: (axis, degree) of each mesh axis, outermost first."""
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
        factors = tuple(_nested(list(all_degrees.items()), _DEVICE))
        return MeshPlacement(system, degrees, factors, False, tuple(notes))
    factors, is_split, order = _torus_factors(system, all_degrees)
    for factor in factors:
        if factor.dim == _SLICE and (axis := factor.axis) != IDLE:
            # Gradients (dp) and stages (pp) communicate least.
            instead = f"; dp={factor.size} or pp={factor.size} would keep {axis} inside slices"
            advice = "" if axis in ("dp", "pp") else instead
            notes.append(f"{axis} runs over {factor.size} slices, on the data-centre network{advice}")
    if is_split:
        advice = "" if torus.splits_axes else "; jax.make_mesh refuses it (mesh_utils has allow_split_physical_axes)"
        mesh = show_degrees(degrees)
        notes.append(
            f"{mesh} does not take whole physical axes of {system}, so links are shared and some rings open{advice}"
        )
    return MeshPlacement(system, degrees, factors, is_split, tuple(notes), order)


def _torus_factors(
    system: System, degrees: Mapping[str, int]
) -> tuple[tuple[AxisFactor, ...], bool, tuple[int, ...] | None]:
    """Return the factors of all mesh axes on a torus, whether axes share a physical axis, and JAX's device order.

    The order is None if JAX has no hard-coded one.
    """
    inside = within_slice(degrees, system.num_slices)
    outer = _nested(list(across_slices(degrees, system.num_slices).items()), _SLICE)
    known = None if IDLE in degrees else jax_device_order(system, tuple(inside.values()))
    if known:
        return (*outer, *_in_order(known.dims, inside)), False, known.order
    cores = {_CORE: system.devices_per_chip} if system.devices_per_chip > 1 else {}
    # The devices of a chip come last, as in the device order of JAX.
    sizes = {_PHYSICAL[i]: size for i, size in enumerate(system.shape) if size > 1} | cores
    parts, is_split = assign(tuple(sizes.values()), tuple(inside.values()))
    factors = outer
    for index, dim in enumerate(sizes):
        factors += _nested([(axis, part[index]) for axis, part in zip(inside, parts, strict=True)], dim)
    return tuple(factors), is_split, None


def _in_order(dims: tuple[tuple[str, int], ...], degrees: Mapping[str, int]) -> list[AxisFactor]:
    """Return the factors of mesh axes laid over dims in order, innermost axis on innermost dim first.

    Args:
        dims: name and size of each physical dimension, outermost first.
        degrees: degree of each mesh axis, outermost first.
    """
    free, factors = [(dim, size, 1) for dim, size in dims], []
    for axis, degree in reversed(list(degrees.items())):
        while degree > 1:
            dim, left, stride = free.pop()
            taken = math.gcd(degree, left)
            if taken > 1:
                factors.append(AxisFactor(axis, dim, taken, stride))
            if taken < left:
                free.append((dim, left // taken, stride * taken))
            degree //= taken
    return factors


def _nested(parts: list[tuple[str, int]], dim: str) -> list[AxisFactor]:
    """Return the factors of the physical dimension `dim`. parts: mesh axes and their sizes in it, outermost first."""
    factors, stride = [], 1
    for axis, size in reversed(parts):
        if size > 1:
            factors.append(AxisFactor(axis, dim, size, stride))
        stride *= size
    return factors


def _on_torus(layout: MeshPlacement, torus: Torus, names: tuple[str, ...], factors: list[AxisFactor]) -> Placement:
    system = layout.system
    slices, cores = (math.prod(p.size for p in factors if p.dim == dim) for dim in (_SLICE, _CORE))
    degree = math.prod(factor.size for factor in factors)
    # Adjacent factors of one dimension form one ring.
    sharers = system.devices_per_chip // cores
    # Hard-coded orders are closed rings of neighbours.
    closes = dict(zip(_PHYSICAL, layout.system.wraps, strict=False)) | {"xy": True, "xyz": True}
    found = []
    for dim, wraps in closes.items():
        for stride, length in _joined([factor for factor in factors if factor.dim == dim]):
            # Groups that interleave on an axis share its links.
            link = torus.link_bytes_per_second / (stride * sharers)
            found.append(Ring(dim, length, stride, wraps and stride * length == _size(layout, dim), link))
    rings = tuple(found)
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


def _size(layout: MeshPlacement, dim: str) -> int:
    """Return the size of a physical dimension: the product of its factors' sizes, `IDLE` included."""
    return math.prod(factor.size for factor in layout.factors if factor.dim == dim)


def _joined(factors: list[AxisFactor]) -> list[tuple[int, int]]:
    """Return the (stride, size) of the factors of one dimension, smallest stride first; adjacent factors are joined."""
    strides: list[tuple[int, int]] = []
    for factor in sorted(factors, key=lambda factor: factor.stride):
        if strides and math.prod(strides[-1]) == factor.stride:
            stride, size = strides.pop()
            strides.append((stride, size * factor.size))
        else:
            strides.append((factor.stride, factor.size))
    return strides


def _on_switches(system: System, names: tuple[str, ...], factors: list[AxisFactor]) -> Placement:
    chip, total = system.chip, system.num_devices
    degree = math.prod(factor.size for factor in factors)
    strides = _joined(factors)
    crossings, below, members, is_split = [], 1, 1, False
    used = devices_per_node(chip, total)
    for index, level in enumerate(chip.levels):
        fills = used if index == 0 else below * level.degree
        above = total if index == len(chip.levels) - 1 else min(fills, total)
        inside, even = _members(strides, above)
        is_split |= not even
        if inside > members:
            link = level.link_bytes_per_second
            # Each device has its own network card, so a node with idle devices has less bandwidth.
            link *= used / chip.levels[0].degree if index == 1 else 1
            link /= total if chip.is_shared else 1
            crossings.append(
                Crossing(level.name, inside // members, members, below // members, link, level.hop_seconds)
            )
        below, members = above, inside
    return Placement(names, degree, (), tuple(crossings), 1, 0.0, is_split)


def _members(strides: list[tuple[int, int]], block: int) -> tuple[int, bool]:
    """Return how many devices of a group are in one block of neighbours, and whether this is equal for all groups.

    If it is not, the number is that of the group with the fewest.

    Args:
        strides: the (stride, size) of the group's factors.
        block: number of consecutive devices in a block.
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
