"""`meshwright devices`: print `meshwright.devices`."""

from __future__ import annotations

import json
from dataclasses import dataclass

from meshwright.cli.waiting import waiting
from meshwright.options.declare import Json
from meshwright.pictures.answers.devices import devices
from meshwright.pictures.text import next_line

EXAMPLES = ("meshwright devices", "meshwright devices --json")


@dataclass(frozen=True)
class Args:
    """List JAX's devices on this machine: kind, coordinates, process, memory, and their name for --on."""

    json: Json = False
    """Print {"platform", "on", "process", "devices": [device, …]} instead."""


def run(args: Args) -> int:
    """Print the devices."""
    with waiting("starting JAX"):
        found = devices()
    if args.json:
        print(json.dumps(found.to_json(), indent=2))
        return 0
    found.print()
    print(next_line(f"meshwright chips {found.system.chip.name}" if found.system else "meshwright chips"))
    return 0
