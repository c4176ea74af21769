"""Predict and rank the meshes of an image model, over the axes dp and fsdp."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from meshwright.description.hardware.fabric import lay_mesh
from meshwright.description.hardware.system import System
from meshwright.description.step.images import STATISTICS, ImageWorkload, check_image_mesh
from meshwright.errors import MeshwrightError
from meshwright.mesh import MeshShape, divisors
from meshwright.planning.cost.images import (
    image_collectives,
    image_flops,
    image_memory,
    image_ops,
    image_step_flops,
    image_update_seconds,
)
from meshwright.planning.cost.rates.achieved import contention_seconds, straggling_seconds
from meshwright.planning.cost.rates.borrowed import borrowed_notes
from meshwright.planning.cost.rates.collective_time import planned_seconds
from meshwright.planning.prediction import SIMULATED
from meshwright.record import Bound, Collective, Record, merge

PLANNED_ONLY = "planned only: what runs are decoders of tokens"


@dataclass(frozen=True)
class ImageRanking:
    """The predicted records of all legal meshes for an image model.

    candidates: first those that fit, fastest first; then the others, least memory first. num_meshes: the number of
    meshes of dp and fsdp, legal or not.
    """

    candidates: tuple[Record, ...]
    num_meshes: int

    @property
    def num_fit(self) -> int:
        """The number of candidates that fit in memory."""
        return sum(bool(record.fits) for record in self.candidates)


def rank_images(workload: ImageWorkload, system: System) -> ImageRanking:
    """Predict and rank every legal mesh of dp and fsdp. Raises if no mesh is legal."""
    shapes = [MeshShape(dp=system.num_devices // fsdp, fsdp=fsdp) for fsdp in divisors(system.num_devices)]
    found: list[Record] = []
    refusals: list[str] = []
    for mesh in shapes:
        try:
            found.append(plan_image_mesh(workload, mesh, system))
        except MeshwrightError as error:
            refusals.append(f"{mesh}: {error}")
    if not found:
        raise MeshwrightError(
            f"none of {len(shapes)} meshes of {system.num_devices} devices can split {workload.model.name} with a batch"
            f" of {workload.batch} images; for one, {refusals[0]}"
        )
    return ImageRanking(tuple(sorted(found, key=_order)), len(shapes))


def plan_image_mesh(workload: ImageWorkload, mesh: MeshShape, system: System) -> Record:
    """Return the predicted record of one mesh. Raises if the mesh cannot split the workload."""
    check_image_mesh(workload, mesh)
    return predict_images(workload, mesh, system)


def predict_images(workload: ImageWorkload, mesh: MeshShape, system: System) -> Record:
    """Return the predicted record of a train step of an image model on a legal mesh.

    Weight gathers and bucketed gradient reductions overlap with the ops of their pass, except the first gather and the
    last reduction. Reductions of batch-norm statistics do not overlap. The terms of `breakdown_seconds` add up to the
    step. `tokens_per_second` is None, because a step has images.
    """
    layout, passes = lay_mesh(system, mesh.layout), {"forward": 0.0, "backward": 0.0}
    for op, seconds, _ in image_ops(workload, mesh, system):
        passes[op.phase] += seconds
    priced = [replace(move, seconds=planned_seconds(move, layout)) for move in image_collectives(workload, mesh)]
    moves = tuple(_exposed(priced, passes))
    breakdown = passes | {"exposed communication": sum(move.exposed_seconds or 0.0 for move in moves)}
    if system.chip.kind == "gpu":
        hidden = sum((move.seconds or 0.0) - (move.exposed_seconds or 0.0) for move in moves)
        breakdown["contention"] = contention_seconds(hidden, system)
        breakdown["stragglers"] = straggling_seconds(sum(passes.values()), mesh.num_devices, system)
    breakdown["update"] = image_update_seconds(workload, mesh, system)
    step, memory = sum(breakdown.values()), image_memory(workload, mesh)
    by_bound: dict[Bound, float] = {
        "compute": 0.0,
        "memory": breakdown["update"],
        "communication": breakdown["exposed communication"],
    }
    for _, taken, ideal in image_ops(workload, mesh, system):
        by_bound[ideal.bound] += taken
    return Record(
        origin="predicted",
        mesh=mesh.degrees,
        hardware=str(system),
        step_seconds=step,
        mfu=image_flops(workload) / (step * system.peak(workload.compute_dtype) * mesh.num_devices),
        flops=image_step_flops(workload, mesh).total,
        memory_bytes=memory,
        fits=memory["peak"] <= system.plannable_bytes,
        bound=max(by_bound, key=by_bound.__getitem__),
        breakdown_seconds=breakdown,
        collectives=merge(moves),
        notes=(*layout.notes, *((SIMULATED,) if system.chip.kind == "cpu" else borrowed_notes(system)), PLANNED_ONLY),
    )


def _exposed(moves: list[Collective], passes: Mapping[str, float]) -> Iterator[Collective]:
    """Yield each collective with its exposed seconds per step: those that the compute of its pass does not hide.

    At least one run of a collective is exposed, except for gathers in backward, which may be hidden completely.
    Reductions of batch-norm statistics are exposed in full. passes: seconds of compute by pass.
    """
    wanted = dict.fromkeys(passes, 0.0)
    for move in moves:
        if move.array != STATISTICS:
            wanted[move.phase] += move.seconds or 0.0
    for move in moves:
        seconds = move.seconds or 0.0
        share = max(0.0, 1 - passes[move.phase] / wanted[move.phase]) if wanted[move.phase] else 0.0
        exposed = seconds if move.array == STATISTICS else max(seconds / move.count, share * seconds)
        # The first gather of the backward pass overlaps with the end of the forward pass.
        if move.kind == "all-gather" and move.phase == "backward":
            exposed = share * seconds
        yield replace(move, exposed_seconds=exposed)


def _order(record: Record) -> tuple[bool, float, float]:
    """Return the sort key of `ImageRanking.candidates`; equally fast records are sorted by memory."""
    fits = bool(record.fits)
    return not fits, record.step_seconds or 0.0 if fits else 0.0, record.memory_bytes["peak"]
