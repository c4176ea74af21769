"""`meshwright show`: draw each device's part of an array, or print a table of a plan's parameters."""

from __future__ import annotations

import json
import shlex
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

from meshwright.cli.kept import kept_plan, mesh_degrees
from meshwright.cli.typed import check_all_read
from meshwright.cli.waiting import waiting
from meshwright.errors import MeshwrightError
from meshwright.options.declare import Json, Mesh, option, positional
from meshwright.pictures.answers.answer import write_picture
from meshwright.pictures.showing import read_text, show, show_data
from meshwright.pictures.tables import console
from meshwright.pictures.text import next_line
from meshwright.planning.plan import Plan
from meshwright.support.files import check_output

EXAMPLES = (
    'meshwright show "A[I_X, J_Y]" --mesh X=2,Y=2 --dims I=8,J=8',
    'meshwright show "A[I_X, J_Y]" --mesh X=4,Y=4 --dims I=8,J=8 --on v5e:4x4 -o picture.svg',
    "meshwright show plan.yaml",
)


@dataclass(frozen=True)
class Args:
    """Show each device's part of an array of any rank, or of a plan's parameters and batch."""

    array: Annotated[str, positional("ARRAY|PLAN|RUN")]
    """An array in the notation: its dims, and the mesh axes that split each. Or a plan.yaml, or a run directory."""
    mesh: Mesh = None
    """The degree of every mesh axis, outermost first, as X=2,Y=2. Needed for an array."""
    dims: Annotated[str | None, option("DIMS")] = None
    """The size of every dim, as I=8,J=8. Needed for an array."""
    dtype: Annotated[str, option("DTYPE")] = "bf16"
    """The type of the elements: f32, bf16, int8, … Default: bf16."""
    all: Annotated[bool, option()] = False
    """Show every legal sharding of the array on the mesh, instead of the typed one."""
    on: Annotated[str | None, option("CHIPS")] = None
    """Also draw the mesh on the torus of this hardware, as v5e:4x4."""
    svg: Annotated[Path | None, option("FILE", "-o")] = None
    """Write the picture to this file: as SVG, or as a page if its name ends in .html."""
    json: Json = False
    """Print {"array", "shape", "local_shape", "mesh", "devices": [{"device", "coordinates", "holds"}], …} instead."""


def run(args: Args) -> int:
    """Show the picture, and write it to a file if --svg is given."""
    svg, as_json = args.svg, args.json
    if svg is not None:
        check_output(svg)
    if (plan := kept_plan(args.array)) is not None:
        check_all_read(args, f"with {args.array}, which is already planned")
        return _show_plan(args.array, plan, svg, as_json=as_json)
    if args.mesh is None or args.dims is None:
        raise MeshwrightError(
            f"{'--mesh' if args.mesh is None else '--dims'} is missing: {args.array!r} is neither a plan's file nor a"
            f" run's directory, and an array needs both, as --mesh X=2,Y=2 --dims I=8,J=8"
        )
    mesh = mesh_degrees(args.mesh)
    array, sizes = read_text(args.array, mesh=mesh, dims=args.dims, dtype=args.dtype)
    picture = show(args.array, mesh=mesh, dims=args.dims, dtype=args.dtype, every=args.all, on=args.on)
    if svg is not None:
        write_picture(picture, svg)
    if as_json:
        print(json.dumps(show_data(array, sizes, every=args.all, on=args.on), indent=2))
        return 0
    # A line that is still too long after parts were left out must not be folded.
    console().print(picture, soft_wrap=True)
    if svg is not None:
        print(f"\n wrote  {svg}")
        return 0
    words = ["meshwright", "show", args.array, "--mesh", args.mesh, "--dims", args.dims]
    words += ["--dtype", args.dtype] if args.dtype != "bf16" else []
    words += ["--on", args.on] if args.on else []
    print(next_line(shlex.join(words) + (" --all --svg FILE" if args.all else " --all")))
    return 0


def _show_plan(name: str, plan: Plan, svg: Path | None, *, as_json: bool) -> int:
    """Print the table of a plan's parameters and batch, and the command that compiles its step."""
    with waiting("loading JAX"):
        from meshwright.pictures.live import plan_rows
    picture = show(plan)
    if svg is not None:
        write_picture(picture, svg)
    if as_json:
        print(json.dumps({"mesh": plan.mesh.degrees, "arrays": [asdict(row) for row in plan_rows(plan)]}, indent=2))
        return 0
    console().print(picture, soft_wrap=True)
    print(f"\n wrote  {svg}" if svg is not None else next_line(f"meshwright verify {shlex.quote(name)}"))
    return 0
