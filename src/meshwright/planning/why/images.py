"""Facts about the plan of an image model, e.g. the number of devices up to which data parallelism is enough."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from meshwright.description.hardware.system import System
from meshwright.description.step.images import ImageWorkload, num_image_parameters
from meshwright.errors import MeshwrightError
from meshwright.mesh import MeshShape
from meshwright.planning.cost.images import IMAGE_AXES, image_memory
from meshwright.planning.images import ImageRanking, predict_images
from meshwright.planning.why.fact import Fact
from meshwright.planning.why.gap import Gap, GapKind, largest_excess
from meshwright.record import Record
from meshwright.units import show_bytes, show_count, show_percent, show_seconds

STATES = ("parameters", "gradients", "optimizer")
"""Memory terms that do not depend on the batch."""


COSTLY = 0.1
"""The fraction of a step from which exposed collectives are too expensive."""


@dataclass(frozen=True)
class ImageStates(Fact):
    """Memory of parameters, gradients and momentum on a device that holds the whole model.

    share: `state_bytes` as a fraction of the device's memory. fits: whether the best plan fits.
    """

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
    """Bytes of activations that a device keeps for the backward pass, and its images per step."""

    bytes: int
    images: int

    def __str__(self) -> str:
        return f"{show_bytes(self.bytes)} are for {show_count(self.images, 'image')} a device, kept for backward"


@dataclass(frozen=True)
class ReplicaInstead(Fact):
    """The mesh with a full copy of the model on every device, and its gap to the best mesh."""

    mesh: MeshShape
    gap: Gap

    def __str__(self) -> str:
        return f"a copy on every device ({self.mesh}) would do, but each would update all of it: {self.gap}"


@dataclass(frozen=True)
class ImageCommunication(Fact):
    """Time of the collectives of a step.

    seconds: the sum over all collectives. equal_images: the number of images per device whose backward pass takes as
    long. images: the images per device. share: `exposed_seconds` as a fraction of the step.
    """

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
    """Number of devices from which, with dp alone, more than `share` of a step is exposed communication.

    devices: None if above `tried`, the largest number tried. images: per device, with `devices` (or
    `tried`) devices.
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
    """Return the facts that determine memory and step time of the best mesh."""
    best = ranking.candidates[0]
    found = (
        *_memory(best, workload, system),
        _replica(ranking),
        _communication(best, workload),
        _scaling(workload, system),
    )
    return tuple(fact for fact in found if fact is not None)


def costly_degree(workload: ImageWorkload, system: System) -> tuple[int | None, int]:
    """Return (devices from which exposed collectives of dp exceed `COSTLY` of a step, largest number tried).

    The system's devices are doubled as long as the batch can be split over them. The first number is None if no number
    tried exceeds it.
    """
    larger, tried = system, system.num_devices
    while workload.batch % larger.num_devices == 0:
        tried = larger.num_devices
        record = predict_images(workload, MeshShape(dp=tried), larger)
        if record.breakdown_seconds["exposed communication"] > COSTLY * (record.step_seconds or 0.0):
            return tried, tried
        try:
            larger = larger.resized(2 * larger.num_chips)
        except MeshwrightError:  # No slice has as many chips.
            break
    return None, tried


def image_gap(record: Record, best: Record) -> Gap:
    """Return the largest difference between a record and the best one."""
    if not record.fits:
        return Gap(GapKind.MEMORY, peak_bytes=record.memory_bytes["peak"])
    if record is best:
        return Gap(GapKind.BEST)
    slowest, seconds = largest_excess(record.breakdown_seconds, best.breakdown_seconds)
    return Gap(GapKind.TERM, slowest, seconds) if seconds > 0 else Gap(GapKind.EQUAL)


def _memory(record: Record, workload: ImageWorkload, system: System) -> Iterator[ImageFact]:
    """Yield two facts: the memory of the whole model's state, and that of a device's activations."""
    memory, mesh = record.memory_bytes, MeshShape(**record.mesh)
    whole = image_memory(workload, MeshShape(dp=workload.batch))
    states = sum(whole[name] for name in STATES)
    count = num_image_parameters(workload.model)
    yield ImageStates(count, states, states / system.usable_bytes, bool(record.fits))
    kept = memory["peak"] - sum(memory[name] for name in STATES)
    yield ImageActivations(kept, workload.batch // mesh.degree(IMAGE_AXES))


def _replica(ranking: ImageRanking) -> ReplicaInstead | None:
    """Return the mesh with a full copy of the model on every device, as a fact; None if it is the best, or illegal."""
    best = ranking.candidates[0]
    copied = next((record for record in ranking.candidates if record.mesh["fsdp"] == 1), None)
    if best.mesh["fsdp"] == 1 or copied is None:
        return None
    return ReplicaInstead(MeshShape(**copied.mesh), image_gap(copied, best))


def _communication(record: Record, workload: ImageWorkload) -> ImageCommunication | None:
    taken = sum(move.seconds or 0.0 for move in record.collectives)
    if not taken:
        return None
    exposed, backward = record.breakdown_seconds["exposed communication"], record.breakdown_seconds["backward"]
    images = workload.batch // MeshShape(**record.mesh).degree(IMAGE_AXES)
    share = exposed / (record.step_seconds or 1)
    return ImageCommunication(taken, images * taken / backward, images, exposed, share)


def _scaling(workload: ImageWorkload, system: System) -> DataParallelLimit | None:
    if system.num_devices == 1 or system.chip.kind == "cpu":
        return None
    costly, tried = costly_degree(workload, system)
    return DataParallelLimit(costly, tried, workload.batch // (costly or tried), COSTLY)
