"""A simulated step of a compiled program: when each op of one device runs, and what it waits for."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from meshwright.description.hardware.system import System
from meshwright.description.hlo.flops import count_flops
from meshwright.description.hlo.module import Module, contradictions_as_errors
from meshwright.description.hlo.phases import source_and_scope
from meshwright.errors import MeshwrightError
from meshwright.planning.cost.rates.achieved import contention_seconds, straggling_seconds
from meshwright.proof.simulate.events import COMPUTE, Event
from meshwright.proof.simulate.fabric import Fabric
from meshwright.proof.simulate.op_seconds import main_dtype
from meshwright.proof.simulate.walk import walk
from meshwright.record import KINDS, PHASES, Collective

EXPOSED_COMMUNICATION, EXPOSED_COPIES, EXPOSED_CALLS = "exposed communication", "exposed copies", "exposed calls"


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """A simulated step of one device.

    events: in order of their start; an event in a loop once, with its repeats. breakdown_seconds: the parts of the
    step, which sum to it: ops by phase, exposed waits, and on GPUs `contention` and `stragglers`, which are not on the
    timeline. flops: those executed by matmuls, per device. peak_flops_per_second: the peak of a device, for the dtype
    with most flops. notes: what the simulation could not determine.
    """

    events: tuple[Event, ...]
    breakdown_seconds: Mapping[str, float]
    flops: float
    peak_flops_per_second: float
    num_devices: int
    notes: tuple[str, ...]

    @property
    def step_seconds(self) -> float:
        """The time of a step: the sum of `breakdown_seconds`."""
        return math.fsum(self.breakdown_seconds.values())

    @property
    def hfu(self) -> float:
        """Hardware flops utilization: executed flops, including recomputation, over time and peak flops."""
        return self.flops / (self.step_seconds * self.peak_flops_per_second)

    @property
    def estimated_share(self) -> float:
        """The fraction of the ops' time that is the compiler's own estimate."""
        ops = [event for event in self.events if event.lane == COMPUTE and event.kind != "loop"]
        whole = math.fsum(event.total_seconds for event in ops)
        return math.fsum(event.total_seconds for event in ops if event.basis == "compiler") / whole if whole else 0.0

    def mfu(self, model_flops: float) -> float:
        """Model flops utilization: a step's model flops over its time and the peak flops of all devices."""
        return model_flops / (self.step_seconds * self.peak_flops_per_second * self.num_devices)

    def exposed_by(self, what: Literal["axes", "phase", "scope", "kind", "source"]) -> dict[str, float]:
        """Exposed communication seconds per step, by the collectives' value of the property `what`, largest first.

        A value of several axes is text, with the axes joined by commas.
        """
        waits: defaultdict[str, float] = defaultdict(float)
        for event in self.events:
            if event.is_communication and event.exposed_seconds:
                value = event.axes if what == "axes" else getattr(event, what)
                waits[value if isinstance(value, str) else ",".join(value)] += event.exposed_seconds * event.count
        return dict(sorted(waits.items(), key=lambda item: -item[1]))

    @cached_property
    def collectives(self) -> tuple[Collective, ...]:
        """Every collective with its total and exposed time per step; a collective in a loop is one entry."""
        found: dict[tuple[str, str], list[Event]] = {}
        for event in self.events:
            if event.kind in KINDS:
                found.setdefault((event.name, event.source), []).append(event)
        return tuple(_collective(events) for events in found.values())


def simulate(module: Module, mesh: Mapping[str, int], system: System) -> Schedule:
    """Simulate a step of one device, from the scheduled program of its compiler.

    mesh: every axis and its degree, outermost first (`MeshShape.layout`). Ops run one after the other in printed order,
    each for the compiler's own estimate if there is one, else for its roofline time. Asynchronous collectives and
    copies run concurrently on the links they need; transfers that share a link run one after the other. An op that
    awaits a transfer stalls until it is done. It is assumed that all devices run in step, and that the memory traffic
    of transfers does not slow ops down. Loop iterations are simulated until one leaves the links as busy as it found
    them, so that the time to simulate does not depend on trip counts.

    Raises if the program is not scheduled, contradicts itself, or is for another number of devices than the mesh has.
    """
    if module.attributes.get("is_scheduled") != "true":
        raise MeshwrightError(f"HLO module {module.name} is not scheduled; compiled.as_text() prints one that is")
    fabric = Fabric(module, mesh, system)
    within = math.prod(fabric.slice_mesh.values())
    if module.num_devices != within:
        raise MeshwrightError(f"HLO module {module.name} runs on {module.num_devices} devices; the mesh has {within}")
    with contradictions_as_errors(module):
        events, notes = walk(fabric)
        flops, dtype = count_flops(module), main_dtype(module, system)
    num_devices = math.prod(mesh.values())
    return Schedule(
        events=events,
        breakdown_seconds=_breakdown(events, system, num_devices),
        flops=float(flops.total),
        peak_flops_per_second=system.peak(dtype),
        num_devices=num_devices,
        notes=tuple(dict.fromkeys((*flops.notes, *notes))),
    )


def _breakdown(events: tuple[Event, ...], system: System, num_devices: int) -> dict[str, float]:
    """Return the seconds of a step by part: the ops of each phase, and each kind of exposed wait that is not zero."""
    parts: dict[str, float] = dict.fromkeys(PHASES, 0.0)
    waits: dict[str, float] = dict.fromkeys((EXPOSED_COMMUNICATION, EXPOSED_COPIES, EXPOSED_CALLS), 0.0)
    hidden = 0.0
    for event in events:
        exposed = event.exposed_seconds * event.count
        if event.lane == COMPUTE:
            parts[event.phase] += event.total_seconds if event.kind != "loop" else 0.0
        elif event.is_communication:
            waits[EXPOSED_COMMUNICATION] += exposed
            hidden += event.total_seconds - exposed
        else:
            waits[EXPOSED_CALLS if event.kind == "call" else EXPOSED_COPIES] += exposed
    waits["contention"] = contention_seconds(hidden, system)
    waits["stragglers"] = straggling_seconds(math.fsum(parts.values()), num_devices, system)
    return parts | {name: seconds for name, seconds in waits.items() if seconds}


def _collective(events: list[Event]) -> Collective:
    """Return the entry of a record for one collective. events: its executions, in and outside loops."""
    first = events[0]
    return Collective(
        kind=next(kind for kind in KINDS if kind == first.kind),
        axes=first.axes,
        phase=first.phase,
        bytes=sum(event.num_bytes * event.count for event in events),
        count=sum(event.count for event in events),
        seconds=math.fsum(event.total_seconds for event in events),
        exposed_seconds=math.fsum(event.exposed_seconds * event.count for event in events),
        source=source_and_scope(first.source, first.scope),
        note=first.note,
    )
