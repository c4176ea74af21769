"""`meshwright show`: what each device holds of an array, as a picture."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional

from meshwright.cli.arguments import Json, option, positional
from meshwright.cli.tables import console
from meshwright.cli.text import next_line
from meshwright.files import check_output, write_file
from meshwright.viz import read_text, show, show_data

EXAMPLES = (
    'meshwright show "A[I_X, J_Y]" --mesh X=2,Y=2 --dims I=8,J=8',
    'meshwright show "A[I_X, J_Y]" --mesh X=4,Y=4 --dims I=8,J=8 --on v5e:4x4 -o picture.svg',
)


@dataclass(frozen=True)
class Args:
    """What each device holds of an array, whatever its rank."""

    array: Annotated[Positional[str], positional("ARRAY")]
    """The array in the notation: its dims, and the mesh axes that split each."""
    mesh: Annotated[str, option("MESH")]
    """The degree of every mesh axis, outermost first, as X=2,Y=2. Needed."""
    dims: Annotated[str, option("DIMS")]
    """The size of every dim, as I=8,J=8. Needed."""
    dtype: Annotated[str, option("DTYPE")] = "bf16"
    """The type of the elements: f32, bf16, int8, … Default: bf16."""
    all: Annotated[bool, option()] = False
    """Every legal sharding of the array on the mesh, instead of the one written."""
    on: Annotated[str | None, option("CHIPS")] = None
    """The mesh on the torus of this hardware too, as v5e:4x4."""
    svg: Annotated[Path | None, option("FILE", "-o")] = None
    """Write the picture to this file, as SVG."""
    json: Json = False
    """Print {"array", "shape", "local_shape", "mesh", "devices": [{"device", "coordinates", "holds"}], …} instead."""


def run(args: Args) -> int:
    """Show the picture, and write it where that is asked for."""
    if args.svg is not None:
        check_output(args.svg)
    array, sizes = read_text(args.array, mesh=args.mesh, dims=args.dims, dtype=args.dtype)
    picture = show(args.array, mesh=args.mesh, dims=args.dims, dtype=args.dtype, every=args.all, on=args.on)
    if args.svg is not None:
        write_file(args.svg, picture.svg)
    if args.json:
        print(json.dumps(show_data(array, sizes, every=args.all, on=args.on), indent=2))
        return 0
    # A line that is still too long after what could be left out must not be folded.
    console().print(picture, soft_wrap=True)
    if args.svg is not None:
        print(f"\n wrote  {args.svg}")
        return 0
    words = ["meshwright", "show", args.array, "--mesh", args.mesh, "--dims", args.dims]
    words += ["--dtype", args.dtype] if args.dtype != "bf16" else []
    words += ["--on", args.on] if args.on else []
    print(next_line(shlex.join(words) + (" --all --svg FILE" if args.all else " --all")))
    return 0
