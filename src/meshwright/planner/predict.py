"""One candidate: what a workload costs on a mesh of a system, as the record to hold compilers and runs against."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from meshwright.cost import (
    PassSeconds,
    collective_efficiency,
    collective_seconds,
    contention_seconds,
    microbatch_seconds,
    model_flops,
    step_collectives,
    step_flops,
    step_memory,
    step_traffic,
    straggling_seconds,
    update_seconds,
)
from meshwright.hardware import Layout, System, lay_mesh
from meshwright.mesh import MeshShape
from meshwright.record import Bound, Collective, Phase, Record, merge
from meshwright.workload import DEFAULT, Strategy, Workload

CRITICAL = frozenset({"tp", "sp", "ep", "pp"})
"""Mesh axes whose collectives stand between two products, the second waiting for the first: nothing hides them."""

WINDOWS: Mapping[Phase, str] = {"forward": "forward", "recompute": "backward", "backward": "backward"}
"""Behind which pass a phase's collectives can hide: what is recomputed is so in backward; of the update none can."""

SIMULATED = "simulated devices share one machine's cores, so times on cpu are an indication"


def predict(workload: Workload, mesh: MeshShape, system: System, strategy: Strategy = DEFAULT) -> Record:
    """The record of a train step: its ops on the chip, its collectives on the fabric, the bubble, the update.

    Collectives of activations are exposed, but those over tp where they overlap. Those that gather weights or sum
    gradients run beside the ops of their pass, and are exposed as far as they take longer. `breakdown_seconds` sums to
    the step.
    """
    layout, parts = lay_mesh(system, mesh.layout), strategy.num_microbatches
    once = microbatch_seconds(workload, mesh, system, strategy)
    passes = {phase: parts * getattr(once, phase) for phase in ("forward", "recompute", "backward")}
    priced = [_priced(move, layout) for move in step_collectives(workload, mesh, strategy)]
    collectives = tuple(_exposed(priced, passes, strategy))
    breakdown = passes | {"exposed communication": sum(move.exposed_seconds or 0.0 for move in collectives)}
    if mesh.pp > 1:
        breakdown["pipeline bubble"] = bubble_seconds(once, collectives, mesh, strategy)
    if system.chip.kind == "gpu":
        hidden = sum((move.seconds or 0.0) - (move.exposed_seconds or 0.0) for move in collectives)
        breakdown["contention"] = contention_seconds(hidden, system)
        breakdown["stragglers"] = straggling_seconds(sum(passes.values()), mesh.num_devices, system)
    breakdown["update"] = update_seconds(workload, mesh, system)
    step, memory = sum(breakdown.values()), step_memory(workload, mesh, strategy)
    return Record(
        origin="predicted",
        mesh=mesh.degrees,
        hardware=str(system),
        step_seconds=step,
        mfu=model_flops(workload) / (step * system.peak(workload.compute_dtype) * mesh.num_devices),
        flops=step_flops(workload, mesh).total,
        memory_bytes=memory,
        fits=memory["peak"] <= system.usable_bytes,
        bound=_bound(workload, mesh, system, breakdown),
        tokens_per_second=workload.tokens / step,
        breakdown_seconds=breakdown,
        collectives=merge(collectives),
        notes=layout.notes + ((SIMULATED,) if system.chip.kind == "cpu" else ()),
    )


def step_bound_seconds(workload: Workload, mesh: MeshShape, system: System, strategy: Strategy) -> float:
    """A time that a step is never under, cheap to have: ops, bubble, stragglers and update, as if links were free."""
    once = microbatch_seconds(workload, mesh, system, strategy).total
    straggling = straggling_seconds(once * strategy.num_microbatches, mesh.num_devices, system)
    worked = once * (strategy.num_microbatches + (mesh.pp - 1) / strategy.virtual_stages)
    return worked + straggling + update_seconds(workload, mesh, system)


def bubble_seconds(
    once: PassSeconds, collectives: tuple[Collective, ...], mesh: MeshShape, strategy: Strategy
) -> float:
    """The time that a device of a pipeline waits for its first microbatch and for the last one's gradient.

    (p - 1) / v microbatches, so that m / (m + (p - 1) / v) of the time is worked: GPipe (arXiv:1811.06965) and 1F1B
    with v = 1, interleaved (arXiv:2104.04473, section 2.2) with more.
    """
    waited = sum(move.exposed_seconds or 0.0 for move in collectives if _is_critical(move) and move.phase != "update")
    return (once.total + waited / strategy.num_microbatches) * (mesh.pp - 1) / strategy.virtual_stages


def _priced(move: Collective, layout: Layout) -> Collective:
    """The collective with the time that all its runs take on the fabric, at the rate that links achieve."""
    once = collective_seconds(move.kind, move.bytes / move.count, layout.placement(move.axes))
    share = collective_efficiency(layout.system, once)
    return replace(move, seconds=max(once.bandwidth_seconds / share, once.latency_seconds) * move.count)


def _exposed(moves: list[Collective], passes: Mapping[str, float], strategy: Strategy) -> Iterator[Collective]:
    """The collectives with what of their time no op hides."""
    free = {"forward": passes["forward"], "backward": passes["recompute"] + passes["backward"]}
    wanted = dict.fromkeys(free, 0.0)
    for move in moves:
        if _can_hide(move, strategy):
            wanted[WINDOWS[move.phase]] += move.seconds or 0.0
    for move in moves:
        share = 1.0
        if _can_hide(move, strategy) and (whole := wanted[WINDOWS[move.phase]]):
            share = max(0.0, 1 - free[WINDOWS[move.phase]] / whole)
        yield replace(move, exposed_seconds=share * (move.seconds or 0.0))


def _can_hide(move: Collective, strategy: Strategy) -> bool:
    """Whether ops run beside a collective."""
    if move.kind == "all-reduce" and move.phase == "backward" and not strategy.overlaps_gradients:
        return False
    return not _is_critical(move) or (strategy.overlaps_tp and move.axes == ("tp",) and move.phase != "update")


def _is_critical(move: Collective) -> bool:
    """Whether something waits for the collective: the next product for activations, the update for the norm."""
    return move.phase == "update" or CRITICAL.issuperset(move.axes)


def _bound(workload: Workload, mesh: MeshShape, system: System, breakdown: Mapping[str, float]) -> Bound:
    """What most of the step waits for; a bubble is no reason of its own."""
    flops, traffic = step_flops(workload, mesh), step_traffic(workload, mesh)
    waits: dict[Bound, float] = {
        "compute": 0.0,
        "memory": breakdown["update"],
        "communication": breakdown["exposed communication"],
    }
    for phase in ("forward", "recompute", "backward"):
        computing = getattr(flops, phase) / system.peak(workload.compute_dtype)
        is_computing = computing >= traffic[phase] / system.hbm_bytes_per_second
        waits["compute" if is_computing else "memory"] += breakdown[phase]
    return max(waits, key=waits.__getitem__)
