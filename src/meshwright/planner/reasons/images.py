"""Why data parallelism is enough for a model of images: until when it hides its sums."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from meshwright.cost import IMAGE_AXES, image_memory
from meshwright.errors import MeshwrightError
from meshwright.hardware import System
from meshwright.mesh import MeshShape
from meshwright.planner.images import ImageRanking, predict_images
from meshwright.planner.reasons.fact import Fact
from meshwright.planner.reasons.gap import Gap, GapKind
from meshwright.record import Record
from meshwright.step import ImageWorkload, num_image_parameters
from meshwright.units import show_bytes, show_count, show_percent, show_seconds

STATES = ("parameters", "gradients", "optimizer")
"""The terms of memory that a model takes whatever its batch."""


COSTLY = 0.1
"""The share of a step from which exposed collectives are worth a warning."""


@dataclass(frozen=True)
class ImageStates(Fact):
    """What parameters, gradients and momentum take of a device's memory, and whether the plan fits."""

    parameters: int
    state_bytes: int
    share: float
    fits: bool

    def __str__(self) -> str:
        verdict = "only the batch has to be split: data parallel" if self.fits else "it is the images that do not fit"
        size = f"{show_bytes(self.state_bytes)}, {show_percent(self.share)} of a device's memory"
        return f"{self.parameters / 1e6:,.1f} M parameters with gradients and momentum are {size}: {verdict}"


@dataclass(frozen=True)
class ImageActivations(Fact):
    """What a device keeps of its images for the backward pass."""

    bytes: int
    images: int

    def __str__(self) -> str:
        return f"{show_bytes(self.bytes)} are for {show_count(self.images, 'image')} a device, kept for backward"


@dataclass(frozen=True)
class ReplicaInstead(Fact):
    """The mesh with a whole copy on every device, and what it would lose."""

    mesh: MeshShape
    gap: Gap

    def __str__(self) -> str:
        return f"a copy on every device ({self.mesh}) would do, but each would update all of it: {self.gap}"


@dataclass(frozen=True)
class ImageCommunication(Fact):
    """What collectives take, in images of the backward pass, and what of it is exposed."""

    seconds: float
    equal_images: float
    images: int
    exposed_seconds: float
    share: float

    def __str__(self) -> str:
        exposed = f"{show_seconds(self.exposed_seconds)} is exposed, {show_percent(self.share)} of the step"
        taken = f"{self.equal_images:.2g} of its {show_count(self.images, 'image')}"
        return f"collectives take {show_seconds(self.seconds)}, as long as the backward pass of {taken}; {exposed}"


@dataclass(frozen=True)
class DataParallelLimit(Fact):
    """From how many devices on data parallelism alone exposes more than a share of the step; None where up to `tried`
    devices it does not. images: of a device there.
    """

    devices: int | None
    tried: int
    images: int
    share: float

    def __str__(self) -> str:
        if self.devices is None:
            most = f"on up to {self.tried:,} devices at least"
            return f"on dp alone this batch keeps that under {self.share:.0%} of the step {most}"
        over = f"over {self.share:.0%} of the step exposed from {self.devices:,} devices on"
        return f"on dp alone this batch has {over}, {show_count(self.images, 'image')} each"


ImageFact = ImageStates | ImageActivations | ReplicaInstead | ImageCommunication | DataParallelLimit


def why_images(ranking: ImageRanking, workload: ImageWorkload, system: System) -> tuple[ImageFact, ...]:
    """What decides the step of the best mesh, with the numbers."""
    best = ranking.candidates[0]
    found = (
        *_memory(best, workload, system),
        _replica(ranking),
        _communication(best, workload),
        _scaling(workload, system),
    )
    return tuple(fact for fact in found if fact is not None)


def costly_degree(workload: ImageWorkload, system: System) -> tuple[int | None, int]:
    """The devices from which the sum of gradients over dp, where nothing hides it, takes `COSTLY` of the step.

    Of the system's chip as many are tried as it has, then twice as many and so on, as long as the batch can be split:
    None where it takes less on all of them, and then the most that were tried.
    """
    larger: System | None = system
    tried = system.num_devices
    while larger is not None and workload.batch % larger.num_devices == 0:
        tried = larger.num_devices
        record = predict_images(workload, MeshShape(dp=tried), larger)
        if record.breakdown_seconds["exposed communication"] > COSTLY * (record.step_seconds or 0.0):
            return tried, tried
        larger = _doubled(larger)
    return None, tried


def _doubled(system: System) -> System | None:
    """Twice as many chips of the same kind; None where there is no such system."""
    try:
        return system.resized(2 * system.num_chips)
    except MeshwrightError:  # No slice has as many chips.
        return None


def image_gap(record: Record, best: Record) -> Gap:
    """The largest difference of a record from the best."""
    if not record.fits:
        return Gap(GapKind.MEMORY, peak_bytes=record.memory_bytes["peak"])
    if record is best:
        return Gap(GapKind.BEST)
    gaps = {name: time - best.breakdown_seconds[name] for name, time in record.breakdown_seconds.items()}
    slowest = max(gaps, key=gaps.__getitem__)
    return Gap(GapKind.TERM, slowest, gaps[slowest]) if gaps[slowest] > 0 else Gap(GapKind.EQUAL)


def _memory(record: Record, workload: ImageWorkload, system: System) -> Iterator[ImageFact]:
    """What a whole copy of the model takes of a device's memory, and what its images take."""
    memory, mesh = record.memory_bytes, MeshShape(**record.mesh)
    whole = image_memory(workload, MeshShape(dp=workload.batch))
    states = sum(whole[name] for name in STATES)
    count = num_image_parameters(workload.model)
    yield ImageStates(count, states, states / system.usable_bytes, bool(record.fits))
    kept = memory["peak"] - sum(memory[name] for name in STATES)
    yield ImageActivations(kept, workload.batch // mesh.degree(IMAGE_AXES))


def _replica(ranking: ImageRanking) -> ReplicaInstead | None:
    """What a copy of the model on every device would lose, where the best mesh stores shards."""
    best = ranking.candidates[0]
    copied = next((record for record in ranking.candidates if record.mesh["fsdp"] == 1), None)
    if best.mesh["fsdp"] == 1 or copied is None:
        return None
    return ReplicaInstead(MeshShape(**copied.mesh), image_gap(copied, best))


def _communication(record: Record, workload: ImageWorkload) -> ImageCommunication | None:
    """What the collectives take, in images of backward, and what of it is exposed."""
    taken = sum(move.seconds or 0.0 for move in record.collectives)
    if not taken:
        return None
    exposed, backward = record.breakdown_seconds["exposed communication"], record.breakdown_seconds["backward"]
    images = workload.batch // MeshShape(**record.mesh).degree(IMAGE_AXES)
    share = exposed / (record.step_seconds or 1)
    return ImageCommunication(taken, images * taken / backward, images, exposed, share)


def _scaling(workload: ImageWorkload, system: System) -> DataParallelLimit | None:
    """Until when data parallelism alone hides its sums."""
    if system.num_devices == 1 or system.chip.kind == "cpu":
        return None
    costly, tried = costly_degree(workload, system)
    return DataParallelLimit(costly, tried, workload.batch // (costly or tried), COSTLY)
