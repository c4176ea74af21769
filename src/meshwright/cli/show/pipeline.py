"""`meshwright show pipeline`: draw a schedule over time, with the work and idle slots of each stage."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from meshwright.cli.answers import print_answer
from meshwright.description.step.passes.schedule import Kind
from meshwright.options.declare import Json, option
from meshwright.pictures.answers.pipeline import pipeline
from meshwright.pictures.text import next_line
from meshwright.support.files import check_output

EXAMPLES = (
    "meshwright show pipeline --stages 4 --microbatches 8",
    "meshwright show pipeline --stages 4 --microbatches 8 --virtual-stages 2 --layers 32 -o pipeline.svg",
)


@dataclass(frozen=True)
class Args:
    """Show a pipeline over time: each stage's microbatches and idle slots."""

    stages: Annotated[int, option("N")]
    """The degree of pp. Needed."""
    microbatches: Annotated[int, option("N")]
    """Number of parts of a batch, which pass through the stages one after the other. Needed."""
    schedule: Annotated[Kind, option("gpipe|1f1b")] = "1f1b"
    """gpipe runs all microbatches forward and then backward; 1f1b goes backward as soon as it can. Default: 1f1b."""
    virtual_stages: Annotated[int, option("N")] = 1
    """Chunks of layers in each stage; several make the schedule interleaved, for which microbatches are a multiple of
    stages. Default: 1."""
    layers: Annotated[int | None, option("N")] = None
    """Number of layers of the model, to label stages with their layers."""
    svg: Annotated[Path | None, option("FILE", "-o")] = None
    """Write the picture to this file: as SVG, or as a page if its name ends in .html."""
    json: Json = False
    """Print {"schedule", "ticks", "bubble", "idle_share", "kept", "cells", "layers"} instead."""


def run(args: Args) -> int:
    """Show the picture, and write it to a file if --svg is given."""
    if args.svg is not None:
        check_output(args.svg)
    found = pipeline(
        args.stages,
        args.microbatches,
        schedule=args.schedule,
        virtual_stages=args.virtual_stages,
        layers=args.layers,
    )
    print_answer(found, args.svg, as_json=args.json)
    if args.json or args.svg is not None:
        return 0
    other = "1f1b" if args.schedule == "gpipe" else "gpipe"
    degrees = f"--stages {args.stages} --microbatches {args.microbatches}"
    virtual = f" --virtual-stages {args.virtual_stages}" if args.virtual_stages > 1 else ""
    print(next_line(f"meshwright show pipeline {degrees}{virtual} --schedule {other}"))
    return 0
