"""`meshwright demo`: the main workflow on this machine, each step a command that a user would type."""

from __future__ import annotations

import itertools as it
import shlex
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from meshwright.options.declare import option
from meshwright.pictures.text import prose_width, wrap
from meshwright.support.files import check_new_directory
from meshwright.units import show_seconds

TINY = "tiny --on cpu:8 --batch 16 --seq-len 256"
MESH = "--mesh 1,2,4,1"
SLICE = "llama3-8b --num-layers 2 --on v5e:4x4 --batch 16 --seq-len 2048"


EXAMPLES = ("meshwright demo", "meshwright demo -o runs/second")


@dataclass(frozen=True)
class Args:
    """Run the main workflow, from a plan to generated text, and plan a TPU slice that is not present."""

    output: Annotated[Path, option("DIRECTORY", "-o")] = Path("runs/demo")
    """Run directory; a number is appended if it exists. Default: runs/demo."""


def run(args: Args) -> int:
    """Run the steps until one fails; return its exit code, or 0."""
    check_new_directory(args.output)
    # A number is appended to the name of a directory that exists.
    names = it.chain([args.output], (args.output.with_name(f"{args.output.name}-{n}") for n in it.count(2)))
    directory = shlex.quote(str(next(name for name in names if not name.exists())))
    began = time.monotonic()
    for title, command in _story(directory):
        print("\n".join(["", "─" * prose_width(), *wrap(title), f"$ meshwright {command}", ""]), flush=True)
        done = subprocess.run([sys.executable, "-m", "meshwright.cli.main", *shlex.split(command)], check=False)
        if done.returncode:
            return done.returncode
    print(f"\n{'─' * prose_width()}\ndone in {show_seconds(time.monotonic() - began)}; the run is in {directory}")
    return 0


def _story(directory: str) -> list[tuple[str, str]]:
    """Return the title and the command line, without `meshwright`, of each step of the demo."""
    return [
        ("1  Which mesh? Predict every legal mesh for a tiny model on 8 simulated devices.", f"plan {TINY} --top 5"),
        ("2  Is the plan right? Compile the real train step and compare.", f"verify {TINY} {MESH}"),
        ("3  Train it.", f"train {TINY} {MESH} --steps 200 -o {directory}"),
        ("4  Predicted, compiled and measured.", f"verify {directory}"),
        ("5  Generate text, with a KV cache on the same mesh.", f'generate {directory} --prompt "def "'),
        ("6  Export it as a Hugging Face directory …", f"export {directory} {directory}/exported"),
        ("7  … and load it onto another mesh.", f'generate {directory}/exported --on cpu:8 --mesh 2,2,2,1 "def "'),
        ("8  Plan two layers of Llama-3-8B on a slice of 16 TPUs that is not present …", f"plan {SLICE} --top 5"),
        ("9  … and compile them with the TPU compiler.", f"verify {SLICE} --mesh 1,4,4,1"),
    ]
