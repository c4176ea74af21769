"""A profile of some steps read back: the collectives that ran, by axes and phase, and how busy each device was.

A trace names the ops that ran; what each of them communicates, over which mesh axes and in which phase, is read from
the HLO of the compiled step (`hlo.each_collective`). Counts are those of the trace, so bytes are measured too.
"""

from __future__ import annotations

import re
import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from jax.profiler import ProfileData

from meshwright.errors import MeshwrightError
from meshwright.hlo import Module, count_executions, each_collective
from meshwright.record import Collective

_DEVICE = re.compile(r"/device:(?:GPU|TPU):(\d+)")
_OP = re.compile(r"%?([\w.-]+)")


@dataclass
class DeviceTrace:
    """What one device did in the traced steps: the intervals of its ops in nanoseconds, and the time of each op."""

    intervals: list[tuple[float, float]] = field(default_factory=list)
    op_seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    op_counts: defaultdict[str, int] = field(default_factory=lambda: defaultdict(int))


@dataclass(frozen=True, kw_only=True)
class DeviceUse:
    """How a device spent the traced steps: the seconds of a step, of its ops (at least one ran) and in collectives."""

    step_seconds: float
    busy_seconds: float
    collective_seconds: float


@dataclass(frozen=True, kw_only=True)
class MeasuredStep:
    """What a trace shows of a step: the mean over the traced steps, and over devices for collectives."""

    collectives: tuple[Collective, ...]
    devices: Mapping[str, DeviceUse]
    not_seen: int
    """Collectives of the program whose ops are not in the trace."""


def find_trace(folder: Path) -> Path:
    """The newest profile below a folder, as JAX's profiler writes it."""
    found = sorted(folder.glob("plugins/profile/*/*.xplane.pb"), key=lambda path: path.stat().st_mtime)
    if not found:
        raise MeshwrightError(f"no profile below {folder}; `meshwright train --profile 10:15` writes one")
    return found[-1]


def read_trace(path: Path, module: Module, mesh: Mapping[str, int], *, steps: int) -> MeasuredStep:
    """What a profile of some steps of a compiled program shows.

    Args:
        path: of the `.xplane.pb`. module: the optimized HLO of the step. mesh: every axis and its degree, in order.
        steps: that were traced.
    """
    devices = _device_traces(path, module)
    if not devices:
        raise MeshwrightError(f"{path} has no op of {module.name}: the profiler of these devices names none")
    found: list[Collective] = []
    communicating: set[str] = set()
    not_seen = 0
    runs = count_executions(module)
    for instruction, entries in each_collective(module, mesh, runs):
        # What the compiler runs as one fusion has the fusion's name in a trace.
        begin = _outer_name(module, instruction.computation, instruction.name)
        names = {begin, *_done_names(module, begin, instruction.computation)}
        counts = [trace.op_counts[begin] for trace in devices.values()]
        # A profiler under load loses an event now and then: of one device, not of most.
        count = statistics.median(counts) / steps
        seconds = sum(trace.op_seconds[name] for trace in devices.values() for name in names)
        communicating |= names
        if not count:
            not_seen += 1
            continue
        total = sum(entry.bytes for entry in entries) or 1
        found += [
            replace(
                entry,
                bytes=round(entry.bytes / entry.count * count),
                count=round(count),
                seconds=seconds / sum(counts) * count * (entry.bytes / total),
                exposed_seconds=None,
            )
            for entry in entries
        ]
    uses = {name: _use(trace, communicating, steps) for name, trace in sorted(devices.items())}
    return MeasuredStep(collectives=tuple(found), devices=uses, not_seen=not_seen)


def _device_traces(path: Path, module: Module) -> dict[str, DeviceTrace]:
    """The ops of a module in a profile, by device."""
    ops = {instruction.name for instruction in module.instructions()}
    devices: defaultdict[str, DeviceTrace] = defaultdict(DeviceTrace)
    for device, name, start, end in _events(ProfileData.from_file(str(path)), module.name):
        if name in ops:
            trace = devices[device]
            trace.intervals.append((start, end))
            trace.op_seconds[name] += (end - start) / 1e9
            trace.op_counts[name] += 1
    return dict(devices)


def _events(profile: Any, module: str) -> Iterator[tuple[str, str, float, float]]:
    """Device, op, begin and end in nanoseconds of everything that may be an op of a module.

    CPUs name the device in each event, TPUs and GPUs have a plane for each device. Of a TPU only the line of ops that
    it ran one after the other is read: it has the starts and the ends of asynchronous ones.
    """
    for plane in profile.planes:
        own = _DEVICE.fullmatch(plane.name)
        if own is None and plane.name != "/host:CPU":
            continue
        is_tpu = "TPU" in plane.name
        for line in plane.lines:
            if is_tpu and line.name != "XLA Ops":
                continue
            for event in line.events:
                stats = dict(event.stats)
                if stats.get("hlo_module", module).split("(")[0] != module or ("hlo_op" not in stats and not is_tpu):
                    continue
                device = own[1] if own else stats.get("device_ordinal")
                name = _OP.match(str(stats.get("hlo_op") or event.name))
                if device is not None and name is not None:
                    yield str(device), name[1], event.start_ns, event.start_ns + event.duration_ns


def _outer_name(module: Module, computation: str, name: str) -> str:
    """The name of an instruction, or of the outermost fusion that it is part of."""
    while len(callers := module.callers[computation]) == 1 and callers[0].opcode == "fusion":
        computation, name = callers[0].computation, callers[0].name
    return name


def _done_names(module: Module, name: str, computation: str) -> list[str]:
    """The ops that end an asynchronous one: what a device waits there is of the collective too."""
    instructions = module.computations[computation].instructions
    if name not in instructions or not instructions[name].opcode.endswith("-start"):
        return []
    return [user.name for user in module.users(instructions[name]) if user.opcode.endswith("-done")]


def _use(trace: DeviceTrace, communicating: set[str], steps: int) -> DeviceUse:
    """How a device spent a step of those that were traced."""
    busy, reached = 0.0, 0.0
    for start, end in sorted(trace.intervals):
        busy += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    span = reached - min(start for start, _ in trace.intervals)
    collectives = sum(seconds for name, seconds in trace.op_seconds.items() if name in communicating)
    return DeviceUse(
        step_seconds=span / 1e9 / steps, busy_seconds=busy / 1e9 / steps, collective_seconds=collectives / steps
    )
