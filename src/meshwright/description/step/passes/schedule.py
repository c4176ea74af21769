"""Pipeline schedules: which microbatch each stage works on in each slot. Used by the runtime, costs and pictures.

All stages run the same program in lockstep, so a schedule is a sequence of slots: in a slot, all stages run forward or
all run backward. A slot's number among those of its phase is its tick. With p stages and v virtual stages, device i has
the chunks i, i + p, i + 2p, … of the layers (arXiv:2104.04473, section 2.2). Microbatches pass all chunks in order in
groups of p, so that a device's output is always the next device's next input. GPipe (arXiv:1811.06965) runs all
microbatches forward, then backward in reverse order. 1F1B starts backward as soon as the first microbatch has passed
all chunks, and then alternates.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from meshwright.description.step.stages import chunk_slots
from meshwright.errors import MeshwrightError

Kind = Literal["gpipe", "1f1b"]
Pass = Literal["forward", "backward"]


Number = Any
"""A whole number or an array of them; the formulas accept both."""


class Unit(NamedTuple):
    """The unit of a device's work in a schedule: one pass of a microbatch through one chunk of the device's layers.

    chunk: counted among the device's own chunks.
    """

    microbatch: Number
    chunk: Number


class Cell(NamedTuple):
    """The work of one stage in one slot: a pass of a microbatch through one of the stage's own chunks."""

    slot: int
    stage: int
    microbatch: int
    chunk: int
    phase: Pass


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """A schedule of `microbatches` through `stages` devices with `virtual_stages` chunks of layers each.

    Raises:
        MeshwrightError: a size is below 1, or `stages` does not divide `microbatches` with several virtual stages.
    """

    stages: int
    microbatches: int
    kind: Kind = "1f1b"
    virtual_stages: int = 1

    def __post_init__(self) -> None:
        p, m = self.stages, self.microbatches
        if min(p, m, self.virtual_stages) < 1:
            raise MeshwrightError(
                f"a pipeline of {p} stages, {m} microbatches and {self.virtual_stages} virtual stages is impossible;"
                f" each is a whole number from 1"
            )
        if self.virtual_stages > 1 and m % p:
            raise MeshwrightError(
                f"{self.virtual_stages} virtual stages take microbatches in groups of pp={p}:"
                f" {m} % {p} = {m % p}; use a multiple of {p}, or one virtual stage"
            )

    @property
    def units(self) -> int:
        """Number of forward units of a device in a step: microbatches times virtual stages."""
        return self.microbatches * self.virtual_stages

    @property
    def ticks(self) -> int:
        """Number of forward slots in a step, which is also the number of backward slots."""
        return self.units + self.stages - 1

    @property
    def warm_up(self) -> int:
        """Number of forward slots before the first microbatch has passed all chunks."""
        return self.virtual_stages * self.stages - 1

    @property
    def bubble(self) -> float:
        """Time that a device waits, divided by the time that it works: (p - 1) / (v m), with m microbatches."""
        return (self.stages - 1) / self.units

    def forward(self, index: Number) -> Unit:
        """Return the unit of forward pass number `index` of a device, counted from 0 in the order of execution."""
        p, v = self.stages, self.virtual_stages
        return Unit(index // (p * v) * p + index % p, index // p % v)

    def backward(self, index: Number) -> Unit:
        """Return the unit of backward pass number `index` of a device in 1F1B. Chunks are in the opposite order."""
        microbatch, chunk = self.forward(index)
        return Unit(microbatch, self.virtual_stages - 1 - chunk)

    def age(self, stage: Number, chunk: Number) -> Number:
        """Return the number of ticks from a unit's forward to its backward pass, on a stage of 1F1B."""
        p, v = self.stages, self.virtual_stages
        return 2 * (p - 1 - stage) + 2 * p * (v - 1 - chunk)

    @property
    def is_balanced(self) -> bool:
        """Whether stages store layer inputs for each other to balance memory (`runtime.pipeline.bpipe`)."""
        return self.kind == "1f1b" and self.virtual_stages == 1

    @property
    def kept(self) -> int:
        """Number of ticks for which a device has memory for inputs that backward needs.

        GPipe: all ticks. 1F1B without virtual stages: the number of stages, because stages store inputs for each other.
        Interleaved 1F1B: the ticks from the first chunk's forward on the first stage to its backward.
        """
        if self.kind == "gpipe":
            return self.ticks
        return self.stages if self.is_balanced else min(self.ticks, self.age(0, 0) + 1)

    @property
    def most_kept(self) -> int:
        """Largest number of units whose inputs a device saves at a time; in interleaved 1F1B, on the first stage."""
        if self.kind == "gpipe" or self.is_balanced:
            return min(self.units, self.kept)
        waiting = most = 0
        for cell in self.cells():
            if cell.stage == 0:
                waiting += 1 if cell.phase == "forward" else -1
                most = max(most, waiting)
        return most

    def cells(self) -> Iterator[Cell]:
        """Yield the work of each stage in each slot, ordered by slot and stage; idle stages are left out."""
        slots = self._slots()
        for slot, (phase, tick) in enumerate(slots):
            for stage in range(self.stages):
                index = tick - (stage if phase == "forward" or self.kind == "gpipe" else self.stages - 1 - stage)
                if 0 <= index < self.units:
                    is_reversed = phase == "backward" and self.kind == "1f1b"
                    unit = self.backward(index) if is_reversed else self.forward(index)
                    yield Cell(slot, stage, *unit, phase)

    def _slots(self) -> list[tuple[Pass, int]]:
        """Return (phase, tick) of each slot in order; GPipe's backward ticks count down."""
        forward: list[tuple[Pass, int]] = [("forward", tick) for tick in range(self.ticks)]
        backward: list[tuple[Pass, int]] = [("backward", tick) for tick in range(self.ticks)]
        if self.kind == "gpipe":
            return forward + backward[::-1]
        # After the warm-up, forward and backward slots alternate until no forward slots are left.
        paired = [slot for pair in zip(forward[self.warm_up :], backward, strict=False) for slot in pair]
        return forward[: self.warm_up] + paired + backward[len(paired) // 2 :]


def chunk_layers(num_layers: int, chunks: int) -> tuple[int, ...]:
    """Return the number of layers in each chunk, in the order in which tokens pass them.

    Numbers differ by at most one; larger ones come first.

    Raises:
        MeshwrightError: a chunk would have no layers.
    """
    if not 1 <= chunks <= num_layers:
        hint = f"1 to {num_layers}" if num_layers > 0 else "at least a layer for each"
        raise MeshwrightError(f"{num_layers} layers cannot fill the {chunks} chunks of a pipeline; use {hint}")
    least, more = divmod(num_layers, chunks)
    return tuple(least + (chunk < more) for chunk in range(chunks))


def slot_layers(num_layers: int, stages: int, virtual_stages: int = 1) -> tuple[int | None, ...]:
    """Return the layer in each layer slot (`step.stages`), ordered by stage, then chunk; None for an empty slot.

    Each chunk has one such slot for every layer of the longest chunk, so that every stage runs the same program.
    """
    counts = chunk_layers(num_layers, stages * virtual_stages)
    starts = [sum(counts[:chunk]) for chunk in range(len(counts))]
    length = chunk_slots(num_layers, stages, virtual_stages)
    return tuple(
        starts[chunk] + slot if slot < counts[chunk] else None
        for stage in range(stages)
        for chunk in range(stage, len(counts), stages)
        for slot in range(length)
    )
