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
    """A pipeline schedule. num_layers: number of layers of the model, to label each stage with its layers."""

    schedule: Schedule
    num_layers: int | None = None

    @property
    def efficiency(self) -> float:
        """The fraction of time in which a device works: m / (m + (p - 1) / v); m microbatches, p stages, v chunks."""
        return 1 - self.idle_share

    @property
    def idle_share(self) -> float:
        """The fraction of time in which a device is idle (the bubble): 1 - efficiency."""
        return idle_share(self.schedule)

    @property
    def bubble(self) -> float:
        """Idle time divided by working time: (p - 1) / (v m), with m microbatches, p stages, v chunks."""
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
        """Return the picture as a self-contained HTML page; file: also write it to this file."""
        return self.picture.html(file)


def pipeline(
    stages: int,
    microbatches: int,
    *,
    schedule: Kind = "1f1b",
    virtual_stages: int = 1,
    layers: int | None = None,
) -> Pipeline:
    """Return a pipeline schedule: the work of each stage over time, and its idle time.

    Args:
        stages: number of pipeline stages, the degree of pp.
        microbatches: number of microbatches, which pass through the stages one after the other.
        schedule: "gpipe" runs all microbatches forward, then all backward; "1f1b" runs each backward as soon as it can.
        virtual_stages: chunks of layers per stage; more than 1 make the schedule interleaved.
        layers: number of layers of the model, to label each stage with its layers.

    Raises:
        MeshwrightError: a number is below 1, or virtual_stages is above 1 and stages do not divide microbatches.

    >>> found = pipeline(4, 8)
    >>> round(found.efficiency, 3), round(found.idle_share, 3), found.bubble
    (0.727, 0.273, 0.375)
    """
    kind = Schedule(stages=stages, microbatches=microbatches, kind=schedule, virtual_stages=virtual_stages)
    return Pipeline(schedule=kind, num_layers=layers)
