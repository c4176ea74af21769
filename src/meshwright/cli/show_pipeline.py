"""`meshwright show pipeline`: a schedule in time, what each stage does in each slot and where it waits."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from meshwright.cli.show import write_file
from meshwright.cli.tables import console
from meshwright.cost.pipeline import Kind, Schedule, slot_layers
from meshwright.viz import show_pipeline


@dataclass(frozen=True)
class Args:
    """A pipeline in time: which microbatch each stage works on in each slot, forward or backward, and where it waits.

    Example: meshwright show pipeline --stages 4 --microbatches 8
    Interleaved: meshwright show pipeline --stages 4 --microbatches 8 --virtual-stages 2 --layers 32
    """

    stages: int
    """The degree of pp."""
    microbatches: int
    """The parts of a batch that go through the stages one after the other."""
    schedule: Kind = "1f1b"
    """gpipe goes forward with all microbatches and then backward; 1f1b goes backward as soon as it can."""
    virtual_stages: int = 1
    """The chunks of layers of each stage; with several the schedule is interleaved."""
    layers: int | None = None
    """The layers of the model: says which of them each stage has."""
    svg: Path | None = None
    """Where to write the picture, as SVG."""
    json: bool = False
    """Print {"schedule", "ticks", "bubble", "kept", "cells", "layers"} instead."""


def run(args: Args) -> int:
    """Show the picture, and write it where that is asked for."""
    schedule = Schedule(
        stages=args.stages,
        microbatches=args.microbatches,
        kind=args.schedule,
        virtual_stages=args.virtual_stages,
    )
    picture = show_pipeline(schedule, num_layers=args.layers)
    if args.svg is not None:
        write_file(args.svg, picture.svg)
    if args.json:
        print(json.dumps(_data(schedule, args.layers), indent=2))
        return 0
    console().print(picture, soft_wrap=True)
    print(f"\n next   {_next(args)}" if args.svg is None else f"\n wrote  {args.svg}")
    return 0


def _next(args: Args) -> str:
    """The command that shows more: the other schedule."""
    other = "1f1b" if args.schedule == "gpipe" else "gpipe"
    said = f"--stages {args.stages} --microbatches {args.microbatches}"
    virtual = f" --virtual-stages {args.virtual_stages}" if args.virtual_stages > 1 else ""
    return f"meshwright show pipeline {said}{virtual} --schedule {other}"


def _data(schedule: Schedule, num_layers: int | None) -> dict[str, Any]:
    """The picture as plain data: every unit of work, and where each stage has which layers."""
    data: dict[str, Any] = {
        "schedule": asdict(schedule),
        "ticks": schedule.ticks,
        "bubble": schedule.bubble,
        "kept": schedule.most_kept,
        "cells": [cell._asdict() for cell in schedule.cells()],
    }
    if num_layers is not None:
        data["layers"] = list(slot_layers(num_layers, schedule.stages, schedule.virtual_stages))
    return data
