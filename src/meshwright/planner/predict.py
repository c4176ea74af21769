"""One candidate: what a workload costs on a mesh of a system, as the record to hold compilers and runs against."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from meshwright.cost import (
    collective_seconds,
    model_flops,
    step_collectives,
    step_flops,
    step_memory,
    step_traffic,
)
from meshwright.hardware import Layout, System, lay_mesh
from meshwright.mesh import MeshShape
from meshwright.record import Bound, Collective, Phase, Record, merge
from meshwright.workload import Workload

CRITICAL = frozenset({"tp", "sp"})
"""Mesh axes whose collectives stand between two products, the second waiting for the first: nothing hides them."""

WINDOWS: Mapping[Phase, str] = {"forward": "forward", "recompute": "backward", "backward": "backward"}
"""Behind which pass a phase's collectives can hide: what is recomputed is so in backward; of the update none can."""

SIMULATED = "simulated devices share one machine's cores, so times on cpu are an indication"


def predict(workload: Workload, mesh: MeshShape, system: System) -> Record:
    """The record of a train step: a roofline of its products, its collectives on the fabric, and the update's traffic.

    Collectives of activations, over tp or sp alone, are exposed. Those that gather weights or sum gradients run beside
    the products of their pass, and are exposed as far as they take longer. `breakdown_seconds` sums to the step.
    """
    flops, traffic = step_flops(workload, mesh), step_traffic(workload, mesh)
    peak, layout = system.peak(workload.compute_dtype), lay_mesh(system, mesh.layout)
    computing = {phase: getattr(flops, phase) / peak for phase in ("forward", "recompute", "backward")}
    passes = {phase: max(time, traffic[phase] / system.hbm_bytes_per_second) for phase, time in computing.items()}
    priced = [_priced(move, layout) for move in step_collectives(workload, mesh)]
    collectives = tuple(_exposed(priced, passes))
    breakdown = passes | {
        "exposed communication": sum(move.exposed_seconds or 0.0 for move in collectives),
        "update": traffic["update"] / system.hbm_bytes_per_second,
    }
    step, memory = sum(breakdown.values()), step_memory(workload, mesh)
    return Record(
        origin="predicted",
        mesh=mesh.degrees,
        hardware=str(system),
        step_seconds=step,
        mfu=model_flops(workload) / (step * peak * mesh.num_devices),
        flops=flops.total,
        memory_bytes=memory,
        fits=memory["peak"] <= system.usable_bytes,
        bound=_bound(breakdown, computing),
        tokens_per_second=workload.tokens / step,
        breakdown_seconds=breakdown,
        collectives=merge(collectives),
        notes=layout.notes + ((SIMULATED,) if system.chip.kind == "cpu" else ()),
    )


def _priced(move: Collective, layout: Layout) -> Collective:
    """The collective with the time that all its runs take on the fabric."""
    once = collective_seconds(move.kind, move.bytes / move.count, layout.placement(move.axes))
    return replace(move, seconds=once.seconds * move.count)


def _exposed(moves: list[Collective], passes: Mapping[str, float]) -> Iterator[Collective]:
    """The collectives with what of their time no product hides."""
    free = {"forward": passes["forward"], "backward": passes["recompute"] + passes["backward"]}
    wanted = dict.fromkeys(free, 0.0)
    for move in moves:
        if not _is_critical(move):
            wanted[WINDOWS[move.phase]] += move.seconds or 0.0
    for move in moves:
        share = 1.0
        if not _is_critical(move) and (whole := wanted[WINDOWS[move.phase]]):
            share = max(0.0, 1 - free[WINDOWS[move.phase]] / whole)
        yield replace(move, exposed_seconds=share * (move.seconds or 0.0))


def _is_critical(move: Collective) -> bool:
    """Whether something waits for the collective: the next product for activations, the update for the norm."""
    return move.phase == "update" or CRITICAL.issuperset(move.axes)


def _bound(breakdown: Mapping[str, float], computing: Mapping[str, float]) -> Bound:
    """What most of the step waits for."""
    waits: dict[Bound, float] = {
        "compute": sum(time for phase, time in computing.items() if breakdown[phase] <= time),
        "memory": sum(breakdown[phase] for phase, time in computing.items() if breakdown[phase] > time),
        "communication": breakdown["exposed communication"],
    }
    waits["memory"] += breakdown["update"]
    return max(waits, key=waits.__getitem__)
