"""What moves data beside a device's arithmetic, and for how long: collectives, sends between slices, copies.

Each keeps some links busy; two that share a link wait for each other.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from meshwright.cost import achieved_seconds
from meshwright.hardware import Layout, Placement, System, lay_mesh
from meshwright.hlo import Instruction, Module, Shape, describe, groups_of, scope_of
from meshwright.hlo.collectives import collective_entries
from meshwright.hlo.dcn import dcn_kind
from meshwright.hlo.groups import Axes, Groups
from meshwright.record import Phase
from meshwright.runtime import within_slice

HOST_SPACE = 5
"""The memory space of the host's memory."""

_STREAM = "stream"
_SLICES = "slices"


@dataclass(frozen=True, kw_only=True)
class Move:
    """Data on its way for so many seconds over some links.

    kind: that of a collective, `copy` between memories of the device, `host copy`, `call` of work that runs beside.
    lane: what it is shown on. source: file:line. note: what could not be told.
    """

    kind: str
    lane: str
    links: frozenset[str]
    seconds: float
    num_bytes: int
    axes: Axes = ()
    phase: Phase = "forward"
    scope: str = ""
    source: str = ""
    note: str = ""


@dataclass(frozen=True)
class Fabric:
    """The links of a system under a mesh, for the program of a slice, which numbers its own devices."""

    module: Module
    mesh: Mapping[str, int] = field(hash=False)
    system: System

    @cached_property
    def within(self) -> dict[str, int]:
        """The degree of each axis inside a slice."""
        return within_slice(self.system, self.mesh)

    @cached_property
    def layout(self) -> Layout:
        """The mesh of a slice laid on it."""
        return lay_mesh(replace(self.system, num_slices=1), self.within)

    def collective(self, instruction: Instruction) -> Move | None:
        """A collective on the links of its axes; None of one in groups of one device.

        Priced as a plan prices it (`planner.predict`). One whose groups are no product of axes is taken over all axes
        that they touch. A permute takes the links of one direction round a ring, as many times as it hops.
        """
        entries = list(collective_entries(self.module, instruction, self.within))
        if not entries:
            return None
        largest, groups = max(entries, key=lambda entry: entry.bytes), groups_of(instruction, self.within)
        axes = largest.axes or _touched(groups, self.within)
        placement, nbytes = self.layout.placement(axes), sum(entry.bytes for entry in entries)
        shift = _shift(groups, self.within, axes) if largest.kind == "collective-permute" else None
        hops = abs(shift) if shift and placement.rings else 1
        move = self._move(
            instruction,
            kind=largest.kind,
            lane=" ".join(("network", ",".join(axes), *_way(shift))),
            links=_links(placement, shift, self.system),
            seconds=achieved_seconds(largest.kind, hops * nbytes, self.layout, axes),
            num_bytes=nbytes,
        )
        return replace(move, axes=axes, phase=largest.phase, note="" if largest.axes else largest.note)

    def copy(self, instruction: Instruction) -> Move:
        """A copy between memories: at the bandwidth of the device's own, or of the way to the host."""
        to_host = touches_host(self.module, instruction)
        rate = self.system.host_bytes_per_second if to_host else self.system.hbm_bytes_per_second
        moved = _moved(self.module, instruction)
        return self._move(
            instruction,
            kind="host copy" if to_host else "copy",
            lane="host" if to_host else "copies",
            links=frozenset({"host" if to_host else "memory"}),
            seconds=moved.padded_bytes / rate,
            num_bytes=moved.padded_bytes,
        )

    def between_slices(self, send: Instruction) -> Move | None:
        """A collective between slices, on each chip's share of its host's network card; None of another transfer.

        The TPU compiler writes it as a send to the runtime (Megascale) and a receive of the result, with the pattern in
        an attribute. The axes are those that cross slices.
        """
        kind, array = dcn_kind(send), next(send.shape.arrays())
        if kind is None or self.system.num_slices == 1:
            return None
        across = lay_mesh(self.system, {_SLICES: self.system.num_slices, **self.within})
        whole = self.system.num_slices if kind == "all-gather" else 1  # what is sent is one slice's part
        axes = tuple(axis for axis, degree in self.mesh.items() if degree > self.within[axis])
        move = self._move(
            send,
            kind=kind,
            lane="network DCN",
            links=frozenset({"DCN"}),
            seconds=achieved_seconds(kind, array.bytes * whole, across, (_SLICES,)),
            num_bytes=array.bytes * whole,
        )
        return replace(move, axes=axes)

    def to_host(self, instruction: Instruction) -> Move:
        """A transfer from or to the host that is no copy between memories."""
        array = next(instruction.shape.arrays())
        return self._move(
            instruction,
            kind="host copy",
            lane="host",
            links=frozenset({"host"}),
            seconds=array.bytes / self.system.host_bytes_per_second,
            num_bytes=array.bytes,
        )

    def called(self, instruction: Instruction, seconds: float) -> Move:
        """Work of a device that is started beside its other work and awaited later."""
        return self._move(
            instruction, kind="call", lane="beside", links=frozenset({"beside"}), seconds=seconds, num_bytes=0
        )

    def _move(
        self, instruction: Instruction, *, kind: str, lane: str, links: frozenset[str], seconds: float, num_bytes: int
    ) -> Move:
        """A move of an instruction, with what is said of where it comes from."""
        said = describe(self.module, instruction, moves=True)[0]
        return Move(
            kind=kind,
            lane=lane,
            links=links,
            seconds=seconds,
            num_bytes=num_bytes,
            phase=said.phase,
            scope=scope_of(said.op_name),
            source=said.source,
        )


def _moved(module: Module, instruction: Instruction) -> Shape:
    """The array that a copy, a slice or an update brings from one memory to the other."""
    parts = instruction.shape.elements
    if instruction.opcode == "dynamic-update-slice":
        return module.operand(instruction, 1).shape
    if instruction.opcode == "dynamic-update-slice-start":
        return parts[0].elements[1]  # ((whole, part, indices...), whole, context)
    if instruction.opcode.endswith("slice-start"):
        return parts[1]  # ((whole, indices...), part, context)
    return parts[0] if parts else instruction.shape  # (copy, source, context)


def touches_host(module: Module, instruction: Instruction) -> bool:
    """Whether a copy goes to or comes from the host's memory."""
    shapes = (instruction.shape, *(operand.shape for operand in module.operands(instruction)))
    return any(array.memory_space == HOST_SPACE for shape in shapes for array in shape.arrays())


def _links(placement: Placement, shift: int | None, system: System) -> frozenset[str]:
    """The links that a collective keeps busy: both ways along its physical axes, one way in a permute; its switches.

    On a GPU also the stream that XLA runs all collectives in, which permutes have their own of.
    """
    ways = "+-" if shift is None else "+" if shift >= 0 else "-"
    links = {f"ICI {ring.axis}{way}" for ring in placement.rings for way in ways}
    if system.chip.kind == "gpu":
        links.add(_STREAM if shift is None else "stream of permutes")
    return frozenset(links | {crossing.level for crossing in placement.crossings})


def _way(shift: int | None) -> tuple[str, ...]:
    """Which way round a permute goes, as a word; none for what uses both."""
    return () if shift is None else ("forth",) if shift >= 0 else ("back",)


def _touched(groups: Groups, mesh: Mapping[str, int]) -> Axes:
    """The axes along which the devices of the first group differ."""
    indices = np.array(np.unravel_index(groups[0], tuple(mesh.values())))
    return tuple(axis for axis, row in zip(mesh, indices, strict=True) if len(set(row.tolist())) > 1)


def _shift(pairs: Groups, mesh: Mapping[str, int], axes: Axes) -> int:
    """By how many devices along its axes, taken together, most pairs of a permute move their data; the shorter way."""
    degrees = tuple(mesh.values())
    size = math.prod(mesh[axis] for axis in axes)
    kept = [number for number, axis in enumerate(mesh) if axis in axes]
    sides = [np.array(np.unravel_index(side, degrees))[kept] for side in zip(*pairs, strict=True)]
    source, target = (np.ravel_multi_index(tuple(side), tuple(mesh[axis] for axis in axes)) for side in sides)
    moved = Counter(np.atleast_1d((target - source) % size).tolist())
    shift = moved.most_common(1)[0][0]
    return shift if 2 * shift <= size else shift - size
