"""`meshwright.pipeline`: a pipeline schedule over time, its bubble, and the activations that a device keeps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from meshwright.description.step.passes.schedule import Kind, Schedule
from meshwright.pictures.answers.answer import DrawnAnswer
from meshwright.pictures.drawings.pipeline import (
    has_textbook,
    idle_share,
    pipeline_data,
    pipeline_sketch,
    textbook_sketch,
)
from meshwright.pictures.picture import Picture
from meshwright.pictures.tables import console


@dataclass(frozen=True, kw_only=True, repr=False)
class Pipeline(DrawnAnswer):
    """A schedule of microbatches through stages. num_layers: of the model, to label stages with their layers."""

    schedule: Schedule
    num_layers: int | None = None

    @property
    def efficiency(self) -> float:
        """The share of total time in which a device works: m / (m + p - 1), or m / (m + (p - 1) / v) with v chunks."""
        return 1 - self.idle_share

    @property
    def idle_share(self) -> float:
        """The bubble as a share of total time: 1 - efficiency."""
        return idle_share(self.schedule)

    @property
    def bubble(self) -> float:
        """The bubble relative to busy time: (p - 1) / (v m)."""
        return self.schedule.bubble

    @property
    def picture(self) -> Picture:
        """The schedule that meshwright runs, and below it 1F1B as published, without lockstep."""
        sketches = [pipeline_sketch(self.schedule, self.num_layers)]
        if has_textbook(self.schedule) and self.schedule.stages > 1:
            sketches.append(textbook_sketch(self.schedule, self.num_layers))
        return Picture(tuple(sketches))

    def to_json(self) -> dict[str, Any]:
        """Return the schedule as plain data, in the schema of `meshwright show pipeline --json`."""
        return pipeline_data(self.schedule, self.num_layers)

    def print(self) -> None:
        """Print the picture."""
        console().print(self.picture, soft_wrap=True)

    def _repr_html_(self) -> str:
        """Return the picture, which is the whole answer, as SVG for notebooks."""
        return self.picture._repr_html_()

    def html(self, file: Any = None) -> str:
        """Return the picture as a self-contained page; also write it to `file` if given."""
        return self.picture.html(file)


def pipeline(
    stages: int,
    microbatches: int,
    *,
    schedule: Kind = "1f1b",
    virtual_stages: int = 1,
    layers: int | None = None,
) -> Pipeline:
    """Return a pipeline schedule over time: the work of each stage in each slot, and its idle slots.

    Args:
        stages: the degree of pp.
        microbatches: number of parts of a batch, which pass through the stages one after the other.
        schedule: "gpipe" runs all microbatches forward, then backward; "1f1b" goes backward as soon as it can.
        virtual_stages: chunks of layers in each stage; several make the schedule interleaved.
        layers: number of layers of the model, to label stages with their layers.

    Raises:
        MeshwrightError: a size is below 1, or stages do not divide microbatches with several virtual stages.

    >>> found = pipeline(4, 8)
    >>> round(found.efficiency, 3), round(found.idle_share, 3), found.bubble
    (0.727, 0.273, 0.375)
    """
    kind = Schedule(stages=stages, microbatches=microbatches, kind=schedule, virtual_stages=virtual_stages)
    return Pipeline(schedule=kind, num_layers=layers)
