"""`meshwright.collective`: the time of one collective on the links of its mesh axes, and what limits it."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from meshwright.description.hardware.fabric import Placement, lay_mesh
from meshwright.description.hardware.system import System
from meshwright.errors import MeshwrightError
from meshwright.mesh import MeshShape
from meshwright.options.values import Count, SystemLike
from meshwright.pictures.answers.answer import DrawnAnswer
from meshwright.pictures.answers.given import Numbers, read_keywords, read_numbers, read_setting
from meshwright.pictures.colours import device_fill
from meshwright.pictures.drawings.collectives import collective_sketch, neighbour_permute, small_values
from meshwright.pictures.drawings.rings import ring_sketch, run_ring
from meshwright.pictures.drawings.torus import torus_sketch
from meshwright.pictures.picture import Picture
from meshwright.pictures.tables import console, show
from meshwright.pictures.text import folded, wrap
from meshwright.planning.cost.formulas import collective_formula
from meshwright.planning.cost.rates.collective import CollectiveTime, collective_seconds
from meshwright.record import Kind, wire_bytes
from meshwright.support.field_types import check_value
from meshwright.units import parse_bytes, show_bytes, show_rate, show_seconds

KINDS: dict[str, Kind] = {
    "all-gather": "all-gather",
    "reduce-scatter": "reduce-scatter",
    "all-reduce": "all-reduce",
    "all-to-all": "all-to-all",
    "permute": "collective-permute",
}
"""The collectives by the names that a user may type."""

MOST_BYTES = 10**15
"""The largest accepted size in bytes: more than the memory of any system."""

BYTES = "64M"
"""The default size of the array."""

MOST_SHOWN = 8
"""The largest number of devices whose values are drawn."""

COUNTED: dict[Kind, str] = {
    "all-gather": "the gathered array",
    "reduce-scatter": "the array to be summed",
    "all-reduce": "the array to be summed",
    "all-to-all": "what a device holds",
    "collective-permute": "what a device holds",
}
"""The array on one device whose size is `bytes`, by collective."""

_INDENT = " " * 12
"""The indentation of the second column of the screen."""

_RUNS = 7
"""How often a measurement runs the collective; it reports the median time."""


@dataclass(frozen=True, kw_only=True, repr=False)
class Collective(DrawnAnswer):
    """One collective with its time on some hardware.

    time: the predicted time, for each part of the fabric. placement: the links that it uses. measured_seconds: the time
    on this machine's devices; None if not measured. notes: the defaults that were applied, and remarks on the
    placement.
    """

    kind: Kind
    mesh: Mapping[str, int]
    system: System
    time: CollectiveTime
    placement: Placement
    measured_seconds: float | None = None
    notes: tuple[str, ...] = field(default=())

    @property
    def axes(self) -> tuple[str, ...]:
        """The mesh axes over which the collective runs."""
        return self.placement.axes

    @property
    def degree(self) -> int:
        """The number of devices that communicate with each other."""
        return self.placement.degree

    @property
    def bytes(self) -> float:
        """The size of the array on one device (`COUNTED`)."""
        return self.time.bytes

    @property
    def wire_bytes(self) -> float:
        """The bytes that each device sends in a ring algorithm."""
        return wire_bytes(self.kind, self.bytes, self.degree)

    @property
    def seconds(self) -> float:
        """The time in seconds with links at full rate: a lower bound."""
        return self.time.seconds

    @property
    def members(self) -> dict[int, str]:
        """The colour of each device in the group of device 0, by the device's number on the mesh."""
        found: dict[int, str] = {}
        for number, at in enumerate(itertools.product(*map(range, self.mesh.values()))):
            coordinates = dict(zip(self.mesh, at, strict=True))
            if not any(place for axis, place in coordinates.items() if axis not in self.axes):
                found[number] = device_fill(coordinates, self.mesh)
        return found

    @property
    def picture(self) -> Picture:
        """The values of one group's devices, before the collective and after each hop; then the links on the torus.

        Raises:
            MeshwrightError: there are more than `MOST_SHOWN` devices, and the hardware has no torus.
        """
        sketches = []
        if self.degree <= MOST_SHOWN:
            values = small_values(self.degree)
            if self.kind == "collective-permute":
                sketches.append(collective_sketch(neighbour_permute(values, degree=self.degree), self.members))
            else:
                sketches.append(ring_sketch(run_ring(self.kind, values, degree=self.degree), self.members))
        if self.system.chip.torus:
            sketches.append(torus_sketch(self.system, self.mesh, axes=self.axes))
        if not sketches:
            raise MeshwrightError(
                f"a picture shows up to {MOST_SHOWN} devices; {self.degree} would fill it: take a smaller mesh"
            )
        return Picture(tuple(sketches))

    def measure(self) -> Collective:
        """Run the collective on this machine's devices, in float32; return the same answer with the measured time.

        Raises:
            MeshwrightError: this machine does not have the devices of the answer.
        """
        from meshwright.execution.runtime.devices import claim_devices
        from meshwright.execution.runtime.single_collective import build_collective

        claim_devices(self.system)
        exchange, array = build_collective(self.kind, dict(self.mesh), self.axes, int(self.bytes))
        exchange(array).block_until_ready()  # Compiles it.
        times = []
        for _ in range(_RUNS):
            began = time.perf_counter()
            exchange(array).block_until_ready()
            times.append(time.perf_counter() - began)
        return replace(self, measured_seconds=statistics.median(times))

    def to_json(self) -> dict[str, Any]:
        """Return the answer as plain data, in the schema of `meshwright collective --json`."""
        found = self.time
        answer: dict[str, Any] = {
            "kind": self.kind,
            "axes": list(self.axes),
            "degree": self.degree,
            "mesh": dict(self.mesh),
            "on": str(self.system),
            "bytes": self.bytes,
            "wire_bytes": self.wire_bytes,
            "seconds": found.seconds,
            "bandwidth_seconds": found.bandwidth_seconds,
            "latency_seconds": found.latency_seconds,
            "regime": found.regime,
            "placement": str(self.placement),
            "binds": found.binds,
        }
        return answer | ({} if self.measured_seconds is None else {"measured_seconds": self.measured_seconds})

    def print(self) -> None:
        """Print the time, then how it is computed, then the measured time if there is one."""
        found, name = self.time, next(word for word, kind in KINDS.items() if kind == self.kind)
        over = f"{name} over {'*'.join(self.axes)} = {self.degree} on {self.system}"
        show(console(), f"{over}   {self.placement}")
        print()
        decided = found.binds or "nothing: one device"
        show(console(), f"  {show_seconds(found.seconds)}, decided by {decided}", style="bold")
        print()
        sent = f"in a ring each device sends {show_bytes(self.wire_bytes)}"
        sizes = f"{show_bytes(found.bytes)}, {COUNTED[self.kind]}; {sent}"
        print("\n".join(wrap(sizes, first=" bytes      ", then=_INDENT)))
        for number, term in enumerate(self.time.terms):
            formula, numbers = collective_formula(self.kind, term, self.placement)
            rate = next(value for name, value in numbers.items() if name in ("B", "W"))
            values = "".join(f", {name} = {show_rate(n, 'B/s') if name in 'BW' else n}" for name, n in numbers.items())
            values += _links_text(self.placement, numbers.get("B", 0.0))
            # The bytes through the links are the product of the two numbers after them.
            through = f"{show_bytes(term.seconds * rate)} at {show_rate(rate, 'B/s')} = {show_seconds(term.seconds)}"
            heading = f" {'' if number else 'links':<10} "
            print("\n".join(wrap(f"{through}, through {term.text}", first=heading, then=_INDENT)))
            print("\n".join(wrap(f"{formula}: V the bytes{values}", first=_INDENT, then=_INDENT)))
        hops = f"{show_seconds(found.latency_seconds)}, all hops however small the array"
        print("\n".join(wrap(hops, first=" latency    ", then=_INDENT)))
        for note in self.notes:
            print(folded(f"note: {note}"))
        if self.measured_seconds is not None:
            found = self.time
            ratio = (
                f"{self.measured_seconds / found.seconds:.2f} x predicted"
                if found.seconds
                else "predicted: no time on one device"
            )
            print(f"\n measured   {show_seconds(self.measured_seconds)}, {ratio}")
            for name, seconds in (("measured", self.measured_seconds), ("predicted", found.seconds)):
                if seconds:
                    print(f" {name:<11}{show_rate(self.wire_bytes / seconds, 'B/s')} sent by each device")


def _links_text(placement: Placement, rate: float) -> str:
    """Return how many links of a torus a bandwidth adds up, ` (2 links of 45.0 GB/s)`; '' for one link or switches.

    rate: the bandwidth of all links of a device together, in bytes per second.
    """
    link = min((ring.link_bytes_per_second for ring in placement.rings), default=0.0)
    count = round(rate / link) if link else 0
    if count < 2:
        return ""
    ways = ", both ways round" if placement.rings[0].is_wrapped else ""
    return f" ({count} links of {show_rate(link, 'B/s')}{ways})"


def collective(
    kind: str,
    *,
    bytes: Count = BYTES,  # noqa: A002
    axis: str | tuple[str, ...] | None = None,
    mesh: Numbers | MeshShape | None = None,
    on: SystemLike | None = None,
    **degrees: Count,
) -> Collective:
    """Return the predicted time of one collective on some hardware, and what limits it.

    Args:
        kind: all-gather, reduce-scatter, all-reduce, all-to-all or permute.
        bytes: size of the array on one device, such as "64MB": the gathered, summed or exchanged array (`COUNTED`).
        axis: the mesh axis over which it runs, or several, such as "X,Y"; by default all axes of the mesh.
        mesh: the degree of every mesh axis, outermost first, such as "X=4,Y=2"; by default X over all devices.
        on: the hardware, such as "v5e:4x4"; by default this machine's devices.
        degrees: degrees of mesh axes by name, instead of `mesh`.

    Raises:
        MeshwrightError: the mesh does not fit the hardware, or does not have the axis.

    >>> answer = collective("all-gather", X=4, on="v5e:4x4", bytes="64M")
    >>> answer.degree, answer.wire_bytes, f"{answer.seconds:.2e}"
    (4, 48000000.0, '1.07e-03')
    """
    check_value("kind", kind, str)
    named: dict[str, Kind] = {**KINDS, **{found: found for found in KINDS.values()}}
    if kind not in named:
        raise MeshwrightError(f"{kind!r} is not a collective; the collectives are {', '.join(KINDS)}")
    given = read_numbers(mesh) if mesh else {}
    given |= read_keywords(degrees)
    chosen = tuple(word.strip() for word in axis.split(",")) if isinstance(axis, str) else axis
    axes = chosen or tuple(given) or ("X",)
    if len(set(axes)) < len(axes):
        raise MeshwrightError(f"--axis {','.join(axes)} names an axis twice; a collective runs over each once")
    setting = read_setting(axes, given, on, is_complete=mesh is not None)
    layout = lay_mesh(setting.system, setting.degrees)
    placement = layout.placement(axes)
    try:
        num_bytes = parse_bytes(str(bytes))
    except MeshwrightError:
        num_bytes = 0
    if not 0 < num_bytes <= MOST_BYTES:
        raise MeshwrightError(f"--bytes is {bytes!r}; it is a whole number from 1 to 1,000T, as 64k, 64MB, 64MiB or 4G")
    found = collective_seconds(named[kind], num_bytes, placement)
    return Collective(
        kind=named[kind],
        mesh=setting.degrees,
        system=setting.system,
        time=found,
        placement=placement,
        notes=(*setting.notes, *layout.notes),
    )
