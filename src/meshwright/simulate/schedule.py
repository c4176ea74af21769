"""A simulated run of a compiled program: when each op of one device runs, what moves beside it, what waits for what."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from meshwright.cost import contention_seconds, straggling_seconds
from meshwright.errors import MeshwrightError
from meshwright.hardware import System
from meshwright.hlo import Module, contradictions_as_errors, count_flops
from meshwright.record import KINDS, PHASES, Collective
from meshwright.simulate.events import COMPUTE, Event
from meshwright.simulate.fabric import Fabric
from meshwright.simulate.op_seconds import main_dtype
from meshwright.simulate.walk import walk

EXPOSED, COPIES, BESIDE = "exposed communication", "exposed copies", "exposed calls"


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """A step of one device as simulated.

    events: in the order they begin; those of a loop once, with how often they repeat. breakdown_seconds: what the step
    is made of, which sums to it: ops by phase, what they wait for, and on GPUs `contention` and `stragglers`, which
    have no place on the timeline. flops: those a device executes, of products. peak_flops_per_second: of a device, in
    the dtype of most of them. notes: what the simulation could not tell.
    """

    events: tuple[Event, ...]
    breakdown_seconds: Mapping[str, float]
    flops: float
    peak_flops_per_second: float
    num_devices: int
    notes: tuple[str, ...]

    @property
    def step_seconds(self) -> float:
        """The time of a step."""
        return math.fsum(self.breakdown_seconds.values())

    @property
    def compute_seconds(self) -> float:
        """The time that ops run."""
        return math.fsum(self.breakdown_seconds[phase] for phase in PHASES)

    @property
    def hfu(self) -> float:
        """The share of the peak that the executed flops have, recomputation included."""
        return self.flops / (self.step_seconds * self.peak_flops_per_second)

    @property
    def estimated_share(self) -> float:
        """The part of the ops' time that is the compiler's own estimate."""
        ops = [event for event in self.events if event.lane == COMPUTE and event.kind != "loop"]
        whole = math.fsum(event.total_seconds for event in ops)
        return math.fsum(event.total_seconds for event in ops if event.basis == "compiler") / whole if whole else 0.0

    def mfu(self, model_flops: float) -> float:
        """The share of the peak that a model's own flops of a step have, given over all devices."""
        return model_flops / (self.step_seconds * self.peak_flops_per_second * self.num_devices)

    def exposed_by(self, what: Literal["axes", "phase", "scope", "kind", "source"]) -> dict[str, float]:
        """The seconds a step that ops wait for collectives, by one of what is known of them; most first.

        Several axes are joined by commas.
        """
        waits: defaultdict[str, float] = defaultdict(float)
        for event in self.events:
            if event.is_communication and event.exposed_seconds:
                value = event.axes if what == "axes" else getattr(event, what)
                waits[value if isinstance(value, str) else ",".join(value)] += event.exposed_seconds * event.count
        return dict(sorted(waits.items(), key=lambda item: -item[1]))

    @cached_property
    def collectives(self) -> tuple[Collective, ...]:
        """Every collective with its time and what of it is exposed, per step; one that a loop repeats is one entry."""
        found: dict[tuple[str, str], list[Event]] = {}
        for event in self.events:
            if event.kind in KINDS:
                found.setdefault((event.name, event.source), []).append(event)
        return tuple(_collective(events) for events in found.values())


def simulate(module: Module, mesh: Mapping[str, int], system: System) -> Schedule:
    """A step of one device of a system, from the scheduled program that its compiler made.

    mesh: every axis and its degree, outermost first (`MeshShape.layout`). Ops run one after the other in the printed
    order, each for the compiler's own estimate where it gives one, else for its roofline. Beside them run asynchronous
    collectives and copies on the links they need, those on the same links one after the other; an op that awaits one
    stands still until it is done. All devices are taken to be in step, and ops, collectives and copies not to slow each
    other down in memory. Loops are walked until a trip leaves the links as it found them, so that simulating takes time
    by the length of the text and not by the trips.

    Raises where the program is not scheduled, contradicts itself, or is for another number of devices.
    """
    if module.attributes.get("is_scheduled") != "true":
        raise MeshwrightError(f"HLO module {module.name} is not scheduled; compiled.as_text() prints one that is")
    fabric = Fabric(module, mesh, system)
    within = math.prod(fabric.within.values())
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
    """What a step is made of; what is nothing is left out but for the phases."""
    parts: dict[str, float] = dict.fromkeys(PHASES, 0.0)
    waits: dict[str, float] = dict.fromkeys((EXPOSED, COPIES, BESIDE), 0.0)
    hidden = 0.0
    for event in events:
        exposed = event.exposed_seconds * event.count
        if event.lane == COMPUTE:
            parts[event.phase] += event.total_seconds if event.kind != "loop" else 0.0
        elif event.is_communication:
            waits[EXPOSED] += exposed
            hidden += event.total_seconds - exposed
        else:
            waits[BESIDE if event.kind == "call" else COPIES] += exposed
    waits["contention"] = contention_seconds(hidden, system)
    waits["stragglers"] = straggling_seconds(math.fsum(parts.values()), num_devices, system)
    return parts | {name: seconds for name, seconds in waits.items() if seconds}


def _collective(events: list[Event]) -> Collective:
    """The runs of one collective as an entry of a record."""
    first = events[0]
    place = " ".join(filter(None, (first.source, f"({first.scope})" if first.scope else "")))
    return Collective(
        kind=next(kind for kind in KINDS if kind == first.kind),
        axes=first.axes,
        phase=first.phase,
        bytes=sum(event.num_bytes * event.count for event in events),
        count=sum(event.count for event in events),
        seconds=math.fsum(event.total_seconds for event in events),
        exposed_seconds=math.fsum(event.exposed_seconds * event.count for event in events),
        source=place,
        note=first.note,
    )
