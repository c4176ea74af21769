"""The time of a step's frozen reference model (DPO): the ops of its forward pass, and its exposed collectives."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from meshwright.description.hardware.fabric import lay_mesh
from meshwright.description.hardware.system import System
from meshwright.description.step.reference import reference_pass
from meshwright.description.step.strategy import Strategy
from meshwright.description.step.workload import Workload
from meshwright.mesh import MeshShape
from meshwright.planning.cost.comm_volume import reference_collectives
from meshwright.planning.cost.rates.achieved import contention_seconds, straggling_seconds
from meshwright.planning.cost.seconds import microbatch_seconds
from meshwright.planning.overlap import communication_time, ring_shares, timed_collectives
from meshwright.record import Collective


def reference_seconds(workload: Workload, mesh: MeshShape, system: System, strategy: Strategy) -> float:
    """Return the seconds of the reference model's pass, which runs before the rest of the step; 0 without one."""
    return _timed(workload, mesh, system, strategy)[0]


def timed_reference_collectives(
    workload: Workload, mesh: MeshShape, system: System, strategy: Strategy
) -> tuple[Collective, ...]:
    """Return the collectives of the reference model, with their seconds and exposed seconds per step."""
    return _timed(workload, mesh, system, strategy)[1]


@lru_cache(maxsize=1 << 12)
def _timed(
    workload: Workload, mesh: MeshShape, system: System, strategy: Strategy
) -> tuple[float, tuple[Collective, ...]]:
    """Return (seconds per step of the reference model's pass, its collectives with their seconds), cached."""
    if (own := reference_pass(workload, mesh, strategy)) is None:
        return 0.0, ()
    layout, parts = lay_mesh(system, own.mesh.layout), own.strategy.num_microbatches
    ops = parts * microbatch_seconds(own.workload, own.mesh, system, own.strategy).forward
    # `CommunicationTime` has only the passes of a train step, so here the reference's phase is called forward.
    moves = [(replace(move, phase="forward"), False) for move in reference_collectives(workload, mesh, strategy)]
    ring = ring_shares(own.workload, own.mesh, system, own.strategy)
    communication = communication_time(moves, layout, own.strategy, ring)
    shares = communication.shares(ops, 0.0)
    timed = timed_collectives(moves, layout, shares, ring, own.strategy)
    total = ops + communication.exposed(shares)
    if system.chip.kind == "gpu":
        total += contention_seconds(communication.hidden(shares), system)
        total += straggling_seconds(ops, own.mesh.num_devices, system)
    return total, tuple(replace(move, phase="reference") for move in timed)
