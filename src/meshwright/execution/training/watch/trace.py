"""Read a trace of JAX's profiler: the collectives that ran, by mesh axes and phase, and how busy each device was.

A trace has the names and times of the ops that ran. The bytes, mesh axes and phase of a collective are from the HLO of
the compiled step (`hlo.collectives.each_collective`).
"""

from __future__ import annotations

import math
import re
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from jax.profiler import ProfileData

from meshwright.description.hlo.collectives import each_collective
from meshwright.description.hlo.loops import count_executions
from meshwright.description.hlo.module import Module
from meshwright.errors import MeshwrightError
from meshwright.record import Collective

_DEVICE = re.compile(r"/device:(?:GPU|TPU):(\d+)")
_OP = re.compile(r"%?([\w.-]+)")


@dataclass(frozen=True, kw_only=True)
class DeviceTrace:
    """Activity of one device over all traced steps.

    Args:
        span_seconds: time from the start of the first op to the end of the last one.
        busy_seconds: time in which at least one op ran.
        op_seconds: total seconds of each op, by its name in the HLO.
        op_counts: number of executions of each op, by its name in the HLO.
    """

    span_seconds: float
    busy_seconds: float
    op_seconds: Mapping[str, float]
    op_counts: Mapping[str, int]


@dataclass(frozen=True, kw_only=True)
class DeviceUse:
    """Seconds per traced step of one device."""

    step_seconds: float
    busy_seconds: float  # In which at least one op ran.
    collective_seconds: float  # In collectives, including waits for their end.


@dataclass(frozen=True, kw_only=True)
class MeasuredStep:
    """Times of a step, averaged over traced steps."""

    collectives: tuple[Collective, ...]  # Their times are averaged over devices too.
    devices: Mapping[str, DeviceUse]  # By global device number.
    not_seen: int
    """Number of collectives of the program whose ops are not in the trace."""


def find_trace(folder: Path) -> Path:
    """Return the newest trace file (`.xplane.pb`) of JAX's profiler in a folder or below. Raises if there is none."""
    found = sorted(folder.glob("plugins/profile/*/*.xplane.pb"), key=lambda path: path.stat().st_mtime)
    if not found:
        raise MeshwrightError(f"no profile below {folder}; `meshwright train --profile 10:15` writes one")
    return found[-1]


def read_trace(path: Path, module: Module) -> dict[int, DeviceTrace]:
    """Return {device number in the trace: activity} for the devices of this process.

    Args:
        path: the `.xplane.pb` file.
        module: the optimized HLO of the step.

    Raises:
        MeshwrightError: the trace has no op of the step's program.
    """
    ops = {instruction.name for instruction in module.instructions()}
    intervals: defaultdict[int, list[tuple[float, float]]] = defaultdict(list)
    seconds: defaultdict[int, defaultdict[str, float]] = defaultdict(lambda: defaultdict(float))
    counts: defaultdict[int, Counter[str]] = defaultdict(Counter)
    for device, name, start, end in _events(ProfileData.from_file(str(path)), module.name):
        if name in ops:
            intervals[device].append((start, end))
            seconds[device][name] += (end - start) / 1e9
            counts[device][name] += 1
    if not intervals:
        raise MeshwrightError(f"{path} has no op of {module.name}: the profiler of these devices names none")
    return {
        device: DeviceTrace(
            span_seconds=(max(end for _, end in ran) - min(start for start, _ in ran)) / 1e9,
            busy_seconds=_covered(ran) / 1e9,
            op_seconds=dict(seconds[device]),
            op_counts=dict(counts[device]),
        )
        for device, ran in intervals.items()
    }


def measured_step(
    devices: Mapping[str, DeviceTrace], module: Module, mesh: Mapping[str, int], *, steps: int
) -> MeasuredStep:
    """Return the measurements of one step from the traces of all devices.

    Args:
        devices: the traces, at least one, by global device number as text.
        module: the optimized HLO of the step.
        mesh: all mesh axes with their degrees, in the order of the mesh.
        steps: number of traced steps.
    """
    found: list[Collective] = []
    communicating: set[str] = set()
    not_seen = 0
    runs = count_executions(module)
    for instruction, entries in each_collective(module, mesh, runs):
        # A trace names a fusion, not the ops in it.
        begin = _outer_name(module, instruction.computation, instruction.name)
        names = {begin, *_done_names(module, begin, instruction.computation)}
        counts = [trace.op_counts.get(begin, 0) for trace in devices.values()]
        # A profiler under load sometimes loses an event of one device, but not of most devices.
        count = statistics.median(counts) / steps
        seconds = sum(trace.op_seconds.get(name, 0.0) for trace in devices.values() for name in names)
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
    uses = {
        number: DeviceUse(
            step_seconds=trace.span_seconds / steps,
            busy_seconds=trace.busy_seconds / steps,
            collective_seconds=sum(trace.op_seconds.get(name, 0.0) for name in communicating) / steps,
        )
        for number, trace in sorted(devices.items(), key=lambda item: int(item[0]))
    }
    return MeasuredStep(collectives=tuple(found), devices=uses, not_seen=not_seen)


def _events(profile: Any, module: str) -> Iterator[tuple[int, str, float, float]]:
    """Yield (device number, name of the op, start, end) of every event that may be an op of a module; in nanoseconds.

    On CPUs each event names its device; TPUs and GPUs have one plane of events per device. On TPUs only the line of
    sequential ops is read, which has the starts and the ends of asynchronous ops.

    module: name of the HLO module.
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
                    yield int(device), name[1], event.start_ns, event.start_ns + event.duration_ns


def _outer_name(module: Module, computation: str, name: str) -> str:
    """Return the name of the outermost fusion that contains an instruction; if none does, the instruction's name."""
    while len(callers := module.callers[computation]) == 1 and callers[0].opcode == "fusion":
        computation, name = callers[0].computation, callers[0].name
    return name


def _done_names(module: Module, name: str, computation: str) -> list[str]:
    """Return the names of the ops that end an asynchronous collective `name`, in which devices may wait for it.

    Empty for a synchronous collective.
    """
    instructions = module.computations[computation].instructions
    if name not in instructions or not instructions[name].opcode.endswith("-start"):
        return []
    return [user.name for user in module.users(instructions[name]) if user.opcode.endswith("-done")]


def _covered(intervals: Iterable[tuple[float, float]]) -> float:
    """Return the total length of the union of intervals (start, end)."""
    covered, reached = 0.0, -math.inf
    for start, end in sorted(intervals):
        covered += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return covered
