"""`meshwright chips`: print `meshwright.chips`."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from meshwright.options.declare import Json, option, positional
from meshwright.pictures.answers.chips import chips
from meshwright.pictures.text import next_line

EXAMPLES = ("meshwright chips", "meshwright chips v5e", "meshwright chips --hardware mine.toml")


@dataclass(frozen=True)
class Args:
    """List the known chips: peaks, memory, links, slices; for one chip, the source of each figure too."""

    chip: Annotated[str | None, positional("CHIP")] = None
    """One chip, by name or alias, as v5e, tpu_v5p or H100. Default: all."""
    hardware: Annotated[Path | None, option("FILE")] = None
    """A TOML file with your own chip, which is checked and shown instead."""
    json: Json = False
    """Print {"chips": [chip, …]}, with sources, instead of the table."""


def run(args: Args) -> int:
    """Print the chips."""
    found = chips(args.chip, hardware=args.hardware)
    if args.json:
        print(json.dumps(found.to_json(), indent=2))
        return 0
    found.print()
    if len(found.chips) > 1:
        print(next_line("meshwright chips NAME", note="all of them, each with its source"))
    return 0
