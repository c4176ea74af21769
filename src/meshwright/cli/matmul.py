"""`meshwright matmul`: print `meshwright.matmul`; with --run, run it too."""

from __future__ import annotations

import json
import math
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from meshwright.cli.answers import print_answer
from meshwright.cli.kept import mesh_degrees
from meshwright.cli.typed import check_all_read
from meshwright.cli.waiting import waiting
from meshwright.cli.words.spell import spelled
from meshwright.errors import MeshwrightError
from meshwright.options.declare import Json, option, positional
from meshwright.options.values import read_count
from meshwright.pictures.answers.answer import write_picture
from meshwright.pictures.answers.cases import matmul_cases
from meshwright.pictures.answers.collective import KINDS
from meshwright.pictures.answers.matmul import MOST_SHOWN, Matmul, matmul
from meshwright.pictures.answers.matmul_run import MOST_DEVICES, check_simulated, run_product
from meshwright.pictures.text import next_line
from meshwright.planning.files import is_run_directory
from meshwright.planning.plan import is_plan_file
from meshwright.support.files import check_output
from meshwright.units import show_mesh

EXAMPLES = (
    'meshwright matmul "A[I, J_X] @ B[J_X, K]"',
    'meshwright matmul "A[B_X, D] @ W[D_X, F] -> C[B_X, F]" --mesh X=8 --dims B=65536,D=8192,F=32768 --on v5p:2x2x2',
    "meshwright matmul cases -o cases.svg",
    'meshwright matmul "B M_x @ M_x E = B E -> RS over x -> B E_x" --mesh x=4 --dims B=1024,M=8192,E=8192 --on v6e:4x4',
)


@dataclass(frozen=True)
class Args:
    """Show the case of a sharded matmul, its collectives, the predicted time of each implementation, and the bound."""

    product: Annotated[str, positional("PRODUCT")]
    """The matmul or resharding, in the notation (or MaxText's); the result is optional. Or: cases, to show all four.
    """
    mesh: Annotated[str | None, option("MESH")] = None
    """The degree of every mesh axis, outermost first, as X=4,Y=2; or a plan.yaml or a run. Default: all devices."""
    dims: Annotated[str | None, option("DIMS")] = None
    """The size of every dim, as B=65536,D=8192,F=32768. Default: 8192 each."""
    on: Annotated[str | None, option("CHIPS")] = None
    """The hardware, as v5p:2x2x2 or h100:8. Default: the devices of this machine."""
    dtype: Annotated[str, option("DTYPE")] = "bf16"
    """The type of the elements: bf16, f32, int8, … Default: bf16."""
    top: Annotated[str | None, option("N")] = None
    """How many implementations to print. Default: 6."""
    device: Annotated[int | None, option("N")] = None
    """Print the part of this device, and mark it in the picture."""
    svg: Annotated[Path | None, option("FILE", "-o")] = None
    """Write a picture of operands, partial sums and result to this file: as SVG, or as a page if it ends in .html."""
    run: Annotated[bool, option()] = False
    """Also run it on simulated devices in every mode of JAX, and compare the compiled collectives (dims up to 256).
    """
    json: Json = False
    """Print {"product", "mesh", …, "case", "collectives", …, "alternatives"} instead; with --run, "run" too."""


def run(args: Args) -> int:
    """Print the times of the matmul; with --run, run it."""
    if args.product == "cases":
        return _run_cases(args)
    if is_plan_file(args.product) or is_run_directory(args.product):
        raise MeshwrightError(
            f"{args.product} is a plan or a run, whose mesh is taken by --mesh {args.product}; `meshwright plan"
            f" {args.product} --ops` prints its matmuls"
        )
    is_run, as_json = args.run, args.json
    degrees = None if args.mesh is None else mesh_degrees(args.mesh)
    product, dims, on, dtype = args.product, args.dims, args.on, args.dtype
    device, svg = args.device, args.svg
    if svg is not None:
        check_output(svg)
    top = MOST_SHOWN if as_json or args.top is None else read_count("--top", args.top)
    check_all_read(args, "with --json" if as_json else "here")
    found = matmul(product, mesh=degrees, dims=dims, on=on, dtype=dtype, device=device)
    if is_run:
        check_simulated(math.prod(found.mesh.values()))
    if svg is not None:
        write_picture(found, svg)
    if not as_json:
        found.print(top)
        if svg is not None:
            print(f"\n wrote  {svg}")
    executed = None
    if is_run:
        with waiting("running it on simulated devices"):
            executed = run_product(found.priced)
    if as_json:
        print(json.dumps(found.to_json() | ({"run": executed.to_json()} if executed else {}), indent=2))
        return 0
    if executed:
        print()
        executed.print()
    print(next_line(_next(args, found)))
    return 0


def _run_cases(args: Args) -> int:
    """Print the four cases of a sharded matmul side by side, for `meshwright matmul cases`."""
    as_json, svg = args.json, args.svg
    if svg is not None:
        check_output(svg)
    degrees = None if args.mesh is None else mesh_degrees(args.mesh)
    found = matmul_cases(mesh=degrees, dims=args.dims, on=args.on, dtype=args.dtype, device=args.device)
    check_all_read(args, "with the four cases")
    print_answer(found, svg, as_json=as_json)
    if not as_json:
        print(next_line(spelled("matmul", args, without=("svg", "device"), product=found.matmuls[2].product)))
    return 0


def _next(args: Args, found: Matmul) -> str:
    """Return the command to suggest next: the same with --run if it was not run and the mesh is small enough.

    Else `meshwright collective` for the longest collective of the first implementation; without collectives,
    `meshwright show` for the result.
    """
    sizes, moves = found.inference.sizes, found.ways[0].collectives
    if not args.run and sizes.degree(sizes.degrees) <= MOST_DEVICES:
        return spelled("matmul", args, without=("top", "svg", "device"), run=True)
    mesh = args.mesh or show_mesh(found.mesh)
    if moves:
        move = max(moves, key=lambda move: move.seconds or 0.0)
        kind = next(word for word, kind in KINDS.items() if kind == move.kind)
        words = ["meshwright", "collective", kind, "--mesh", mesh, "--axis", ",".join(move.axes)]
        return shlex.join([*words, "--on", str(found.system), "--bytes", str(move.bytes)])
    result = found.inference.result
    dims = ",".join(f"{dim}={sizes.dims[dim]}" for dim in result.dims)
    return shlex.join(["meshwright", "show", str(result), "--mesh", mesh, "--dims", dims, "--dtype", args.dtype])
