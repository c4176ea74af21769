"""Transfers that run concurrently with a device's ops, and their time: collectives, sends between slices, copies.

Each transfer occupies links; transfers that share a link wait for each other.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from meshwright.description.hardware.fabric import MeshPlacement, lay_mesh
from meshwright.description.hardware.slices import within_slice
from meshwright.description.hardware.system import System
from meshwright.description.hlo.collectives import collective_entries, groups_of
from meshwright.description.hlo.dcn import dcn_kind
from meshwright.description.hlo.groups import Axes, Groups
from meshwright.description.hlo.module import Instruction, Module
from meshwright.description.hlo.phases import describe
from meshwright.description.hlo.shapes import Shape
from meshwright.planning.cost.rates.collective_time import achieved_seconds
from meshwright.record import Phase

HOST_SPACE = 5
"""The host's memory space in HLO layouts."""

_STREAM = "stream"
_SLICES = "slices"


@dataclass(frozen=True, kw_only=True)
class Transfer:
    """One execution of a collective, a copy or an asynchronous call, which runs concurrently with the device's ops.

    kind: a collective's kind, `copy` between memories of the device, `host copy`, or `call` for asynchronous work.
    lane: the row of the timeline that shows it. links: names of the links that it occupies. source: file:line. note:
    what could not be determined.
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
    """Computes the transfers of a program, with their seconds on the links of a system.

    The program is that of one slice, in which devices are numbered from 0. mesh: the degree of every axis on the whole
    system, outermost first.
    """

    module: Module
    mesh: Mapping[str, int] = field(hash=False)
    system: System

    @cached_property
    def slice_mesh(self) -> dict[str, int]:
        """The degree of each axis inside a slice."""
        return within_slice(self.mesh, self.system.num_slices)

    @cached_property
    def layout(self) -> MeshPlacement:
        """The placement of `slice_mesh` on the links of a slice."""
        return lay_mesh(replace(self.system, num_slices=1), self.slice_mesh)

    def collective(self, instruction: Instruction) -> Transfer | None:
        """Return the transfer of a collective over the links of its axes; None if its groups have one device.

        Its time is computed as in a plan (`planning.prediction.predict`). If its groups are not a product of axes, all
        axes they touch are used. A permute uses the links of one direction of a ring, once for each hop.
        """
        entries = list(collective_entries(self.module, instruction, self.slice_mesh))
        if not entries:
            return None
        largest, groups = max(entries, key=lambda entry: entry.bytes), groups_of(instruction, self.slice_mesh)
        axes = largest.axes or _touched_axes(groups, self.slice_mesh)
        placement, nbytes = self.layout.placement(axes), sum(entry.bytes for entry in entries)
        shift = _shift(groups, self.slice_mesh, axes) if largest.kind == "collective-permute" else None
        direction = () if shift is None else ("forth",) if shift >= 0 else ("back",)
        hops = abs(shift) if shift and placement.rings else 1
        # On a GPU also the stream in which XLA runs it: permutes have one stream, all other collectives another.
        ways = "+-" if shift is None else "+" if shift >= 0 else "-"
        links = {f"ICI {ring.axis}{way}" for ring in placement.rings for way in ways}
        if self.system.chip.kind == "gpu":
            links.add(_STREAM if shift is None else "stream of permutes")
        transfer = self._transfer(
            instruction,
            kind=largest.kind,
            lane=" ".join(("network", ",".join(axes), *direction)),
            links=frozenset(links | {crossing.level for crossing in placement.crossings}),
            seconds=achieved_seconds(largest.kind, hops * nbytes, self.layout, axes),
            num_bytes=nbytes,
        )
        return replace(transfer, axes=axes, phase=largest.phase, note="" if largest.axes else largest.note)

    def copy(self, instruction: Instruction) -> Transfer:
        """Return the transfer of a copy between memories, at the bandwidth of HBM or of the path to the host."""
        to_host = touches_host(self.module, instruction)
        rate = self.system.host_bytes_per_second if to_host else self.system.hbm_bytes_per_second
        moved = _transferred_shape(self.module, instruction)
        return self._transfer(
            instruction,
            kind="host copy" if to_host else "copy",
            lane="host" if to_host else "copies",
            links=frozenset({"host" if to_host else "memory"}),
            seconds=moved.padded_bytes / rate,
            num_bytes=moved.padded_bytes,
        )

    def dcn_collective(self, send: Instruction) -> Transfer | None:
        """Return the transfer of a collective between slices; None if a send does not start one.

        Its rate is each chip's share of the bandwidth of the host's NIC. The TPU compiler writes such a collective as a
        send to the runtime (Megascale) and a receive of the result, and names its kind in an attribute. Its axes are
        those that cross slices.
        """
        kind, array = dcn_kind(send), next(send.shape.arrays())
        if kind is None or self.system.num_slices == 1:
            return None
        across = lay_mesh(self.system, {_SLICES: self.system.num_slices, **self.slice_mesh})
        whole = self.system.num_slices if kind == "all-gather" else 1  # the send has one slice's part
        axes = tuple(axis for axis, degree in self.mesh.items() if degree > self.slice_mesh[axis])
        transfer = self._transfer(
            send,
            kind=kind,
            lane="network DCN",
            links=frozenset({"DCN"}),
            seconds=achieved_seconds(kind, array.bytes * whole, across, (_SLICES,)),
            num_bytes=array.bytes * whole,
        )
        return replace(transfer, axes=axes)

    def host_transfer(self, instruction: Instruction) -> Transfer:
        """Return the transfer of a send to or a receive from the host."""
        array = next(instruction.shape.arrays())
        return self._transfer(
            instruction,
            kind="host copy",
            lane="host",
            links=frozenset({"host"}),
            seconds=array.bytes / self.system.host_bytes_per_second,
            num_bytes=array.bytes,
        )

    def async_call(self, instruction: Instruction, seconds: float) -> Transfer:
        """Return the transfer of an asynchronous call, which takes `seconds` and runs concurrently with other ops."""
        return self._transfer(
            instruction, kind="call", lane="beside", links=frozenset({"beside"}), seconds=seconds, num_bytes=0
        )

    def _transfer(
        self, instruction: Instruction, *, kind: str, lane: str, links: frozenset[str], seconds: float, num_bytes: int
    ) -> Transfer:
        """Return a transfer with the phase, scope and source of its instruction."""
        said = describe(self.module, instruction, moves=True)[0]
        return Transfer(
            kind=kind,
            lane=lane,
            links=links,
            seconds=seconds,
            num_bytes=num_bytes,
            phase=said.phase,
            scope=said.scope,
            source=said.source,
        )


def _transferred_shape(module: Module, instruction: Instruction) -> Shape:
    """Return the shape of the array that a copy, a slice or an update transfers."""
    parts = instruction.shape.elements
    if instruction.opcode == "dynamic-update-slice":
        return module.operand(instruction, 1).shape
    if instruction.opcode == "dynamic-update-slice-start":
        return parts[0].elements[1]  # ((whole, part, indices...), whole, context)
    if instruction.opcode.endswith("slice-start"):
        return parts[1]  # ((whole, indices...), part, context)
    return parts[0] if parts else instruction.shape  # (copy, source, context)


def touches_host(module: Module, instruction: Instruction) -> bool:
    """Whether a copy reads or writes the host's memory."""
    shapes = (instruction.shape, *(operand.shape for operand in module.operands(instruction)))
    return any(array.memory_space == HOST_SPACE for shape in shapes for array in shape.arrays())


def _touched_axes(groups: Groups, mesh: Mapping[str, int]) -> Axes:
    """Return the mesh axes along which the devices of the first group differ."""
    indices = np.array(np.unravel_index(groups[0], tuple(mesh.values())))
    return tuple(axis for axis, row in zip(mesh, indices, strict=True) if len(set(row.tolist())) > 1)


def _shift(pairs: Groups, mesh: Mapping[str, int], axes: Axes) -> int:
    """Return the most frequent distance from source to target of a permute, in devices along the flattened axes.

    It is negative if going backwards round the ring is shorter. pairs: (source, target) of each transfer.
    """
    degrees = tuple(mesh.values())
    size = math.prod(mesh[axis] for axis in axes)
    kept = [number for number, axis in enumerate(mesh) if axis in axes]
    sides = [np.array(np.unravel_index(side, degrees))[kept] for side in zip(*pairs, strict=True)]
    source, target = (np.ravel_multi_index(tuple(side), tuple(mesh[axis] for axis in axes)) for side in sides)
    moved = Counter(np.atleast_1d((target - source) % size).tolist())
    shift = moved.most_common(1)[0][0]
    return shift if 2 * shift <= size else shift - size
