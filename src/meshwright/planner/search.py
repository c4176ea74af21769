"""The legal meshes of a workload on a system, best first."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from meshwright.cost import step_memory
from meshwright.errors import MeshwrightError
from meshwright.hardware import System
from meshwright.mesh import AXES, POSITIONAL, MeshShape, divisors
from meshwright.planner.predict import predict, step_bound_seconds
from meshwright.record import Record
from meshwright.workload import DEFAULT, Strategy, Workload, check_mesh, check_runnable


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


def rank(workload: Workload, system: System, axes: tuple[str, ...] = POSITIONAL) -> Ranking:
    """Every legal mesh of some axes over all devices of the system, priced and ranked.

    The default are the axes that `meshwright train` runs over. No legal mesh is an error that says why.
    """
    shapes = list(meshes(system.num_devices, axes))
    found = [price(workload, mesh, system) for mesh in _legal(workload, system, shapes)]
    return Ranking(tuple(sorted(found, key=_order)), len(shapes))


def find_best(workload: Workload, system: System, axes: tuple[str, ...] = AXES) -> Record:
    """The first of what `rank` would find, without pricing what cannot be first.

    What does not fit is never better than what does, and no step is under its bound (`step_bound_seconds`): ways are
    tried from the smallest bound on, until that exceeds the best time found.
    """
    legal = _legal(workload, system, list(meshes(system.num_devices, axes)))
    bounded = [
        (step_bound_seconds(workload, mesh, system, strategy), mesh, strategy)
        for mesh in legal
        for strategy in strategies(workload, mesh)
    ]
    best: Record | None = None
    for bound, mesh, strategy in sorted(bounded, key=lambda way: way[0]):
        if best is not None and bound > (best.step_seconds or 0.0):
            break
        if step_memory(workload, mesh, strategy)["peak"] <= system.usable_bytes:
            record = _run(workload, mesh, system, strategy)
            best = record if best is None else min(best, record, key=_order)
    if best is None:
        return min((price(workload, mesh, system) for mesh in legal), key=_order)
    return best


def price(workload: Workload, mesh: MeshShape, system: System) -> Record:
    """The record of a mesh, run in the best of the ways there are (`strategies`)."""
    return min((_run(workload, mesh, system, way) for way in strategies(workload, mesh)), key=_order)


def _run(workload: Workload, mesh: MeshShape, system: System, strategy: Strategy) -> Record:
    """The record of a mesh run in one way; its notes say where `meshwright train` cannot run that."""
    record = predict(workload, mesh, system, strategy)
    notes = list(record.notes)
    if mesh.pp > 1:
        parts = strategy.num_microbatches
        interleaved = f", {strategy.virtual_stages} virtual stages" if strategy.virtual_stages > 1 else ""
        notes.append(f"{strategy.schedule} with {parts} microbatch{'es' if parts > 1 else ''}{interleaved}")
    try:
        check_runnable(workload.model, mesh)
    except MeshwrightError as error:
        notes.append(f"planned only: {error}")
    return replace(record, notes=tuple(notes))


def strategies(workload: Workload, mesh: MeshShape) -> Iterator[Strategy]:
    """The ways to run a mesh that are worth a look: of a pipeline every number of microbatches, interleaved or not.

    Parameters are kept gathered there (ZeRO-2), as gathering them for every microbatch costs more than it saves.
    Two virtual stages want layers that divide evenly and whole rounds of microbatches (arXiv:2104.04473, section 2.2).
    """
    if mesh.pp == 1:
        yield DEFAULT
        return
    layers, rest = divmod(workload.model.num_layers, mesh.pp)
    for parts in divisors(workload.batch // mesh.degree(("dp", "fsdp", "ep"))):
        for virtual in (1, 2) if rest == layers % 2 == parts % mesh.pp == 0 else (1,):
            yield Strategy(num_microbatches=parts, zero_stage=2, virtual_stages=virtual)


def meshes(num_devices: int, axes: tuple[str, ...] = POSITIONAL) -> Iterator[MeshShape]:
    """Every mesh of some axes with that many devices."""
    for degrees in _factorings(num_devices, len(axes)):
        yield MeshShape(**dict(zip(axes, degrees, strict=True)))


def _factorings(product: int, count: int) -> Iterator[tuple[int, ...]]:
    """Every way to write a number as a product of so many, in order."""
    if count == 1:
        yield (product,)
        return
    for first in divisors(product):
        for rest in _factorings(product // first, count - 1):
            yield (first, *rest)


def _legal(workload: Workload, system: System, shapes: list[MeshShape]) -> list[MeshShape]:
    """The meshes that can split the workload; none is an error that says why the first cannot."""
    found, refusals = [], []
    for mesh in shapes:
        try:
            check_mesh(workload, mesh)
        except MeshwrightError as error:
            refusals.append(f"{mesh}: {error}")
        else:
            found.append(mesh)
    if not found:
        raise MeshwrightError(
            f"none of {len(shapes)} meshes of {system.num_devices} devices can split {workload.model.name} with a batch"
            f" of {workload.batch} x {workload.seq_len} tokens; for one, {refusals[0]}"
        )
    return found


def _order(record: Record) -> tuple[bool, float, float]:
    """Fitting first, then fast; of two as fast, the one with more memory left."""
    fits = bool(record.fits)
    return not fits, record.step_seconds or 0.0 if fits else 0.0, record.memory_bytes["peak"]
