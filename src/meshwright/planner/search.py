"""The legal meshes of a workload on a system, best first."""

from __future__ import annotations

import itertools as it
from dataclasses import dataclass

from meshwright.errors import MeshwrightError
from meshwright.hardware import System
from meshwright.mesh import POSITIONAL, MeshShape, divisors
from meshwright.planner.predict import predict
from meshwright.record import Record
from meshwright.workload import Workload, check_mesh


@dataclass(frozen=True)
class Ranking:
    """The candidates, best first: those that fit by step time, then those that do not by how much memory they want."""

    candidates: tuple[Record, ...]
    num_meshes: int
    """All the ways to make a mesh of the devices, legal for the workload or not."""

    @property
    def num_fit(self) -> int:
        """How many candidates fit in memory."""
        return sum(bool(record.fits) for record in self.candidates)


def rank(workload: Workload, system: System) -> Ranking:
    """Every legal mesh over all devices of the system, priced and ranked; no legal mesh is an error that says why."""
    shapes = list(_meshes(system.num_devices))
    candidates, refusals = [], []
    for mesh in shapes:
        try:
            check_mesh(workload, mesh)
        except MeshwrightError as error:
            refusals.append(f"{mesh}: {error}")
        else:
            candidates.append(predict(workload, mesh, system))
    if not candidates:
        raise MeshwrightError(
            f"none of {len(shapes)} meshes of {system.num_devices} devices can split {workload.model.name} with a batch"
            f" of {workload.batch} x {workload.seq_len} tokens; for one, {refusals[0]}"
        )
    return Ranking(tuple(sorted(candidates, key=_order)), len(shapes))


def _meshes(num_devices: int) -> list[MeshShape]:
    """Every mesh of dp, fsdp, tp and sp with that many devices."""
    found = []
    for dp, fsdp, tp in it.product(divisors(num_devices), repeat=3):
        if num_devices % (dp * fsdp * tp) == 0:
            found.append(
                MeshShape(**dict(zip(POSITIONAL, (dp, fsdp, tp, num_devices // (dp * fsdp * tp)), strict=True)))
            )
    return found


def _order(record: Record) -> tuple[bool, float, float]:
    """Fitting first, then fast; of two as fast, the one with more memory left."""
    fits = bool(record.fits)
    return not fits, record.step_seconds or 0.0 if fits else 0.0, record.memory_bytes["peak"]
