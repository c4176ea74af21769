"""`meshwright matmul`: print `meshwright.matmul`, and run it if asked."""

from __future__ import annotations

import json
import math
import shlex
from dataclasses import dataclass
from typing import Annotated

import tyro

from meshwright.cli.kept import mesh_degrees
from meshwright.cli.typed import check_all_read
from meshwright.cli.waiting import waiting
from meshwright.cli.words.spell import spelled
from meshwright.options.declare import Json, option, positional
from meshwright.options.values import read_count
from meshwright.pictures.answers.collective import KINDS
from meshwright.pictures.answers.matmul import MOST_SHOWN, Matmul, matmul
from meshwright.pictures.answers.matmul_run import MOST_DEVICES, check_simulated, run_product
from meshwright.pictures.text import next_line

EXAMPLES = (
    'meshwright matmul "A[I, J_X] @ B[J_X, K]"',
    'meshwright matmul "A[B_X, D] @ W[D_X, F] -> C[B_X, F]" --mesh X=8 --dims B=65536,D=8192,F=32768 --on v5p:2x2x2',
    'meshwright matmul "B M_x @ M_x E = B E -> RS over x -> B E_x" --mesh x=4 --dims B=1024,M=8192,E=8192 --on v6e:4x4',
)


@dataclass(frozen=True)
class Args:
    """The case of a sharded product, the collectives it needs, every way to do it priced on a chip, and what binds."""

    product: Annotated[tyro.conf.Positional[str], positional("PRODUCT")]
    """The product or resharding, in the notation (or MaxText's); the result wanted may be left out."""
    mesh: Annotated[str | None, option("MESH")] = None
    """The degree of every mesh axis, outermost first, as X=4,Y=2; or a plan.yaml or a run. Default: all devices."""
    dims: Annotated[str | None, option("DIMS")] = None
    """The size of every dim, as B=65536,D=8192,F=32768. Default: 8192 each."""
    on: Annotated[str | None, option("CHIPS")] = None
    """The hardware, as v5p:2x2x2 or h100:8. Default: the devices of this machine."""
    dtype: Annotated[str, option("DTYPE")] = "bf16"
    """The type of the elements: bf16, f32, int8, … Default: bf16."""
    top: Annotated[str | None, option("N")] = None
    """How many ways to print. Default: 6."""
    run: Annotated[bool, option()] = False
    """Do it on simulated devices too, in every mode of JAX, and compare the compiled collectives (dims cut to 256)."""
    json: Json = False
    """Print {"product", "mesh", …, "case", "collectives", …, "alternatives"} instead; with --run, "run" too."""


def run(args: Args) -> int:
    """Print the price of the product, and run it if asked."""
    is_run, as_json = args.run, args.json
    degrees = None if args.mesh is None else mesh_degrees(args.mesh)
    product, dims, on, dtype = args.product, args.dims, args.on, args.dtype
    top = MOST_SHOWN if as_json or args.top is None else read_count("--top", args.top)
    check_all_read(args, "beside --json" if as_json else "here")
    found = matmul(product, mesh=degrees, dims=dims, on=on, dtype=dtype)
    if is_run:
        check_simulated(math.prod(found.mesh.values()))
    if not as_json:
        found.print(top)
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


def _next(args: Args, found: Matmul) -> str:
    """Return the next command: `--run`; after that the longest collective of way 1, or `show` where there is none."""
    sizes, moves = found.inference.sizes, found.ways[0].collectives
    if not args.run and sizes.degree(sizes.degrees) <= MOST_DEVICES:
        return spelled("matmul", args, without=("top",), run=True)
    mesh = args.mesh or ",".join(f"{axis}={degree}" for axis, degree in found.mesh.items())
    if moves:
        move = max(moves, key=lambda move: move.seconds or 0.0)
        kind = next(word for word, kind in KINDS.items() if kind == move.kind)
        words = ["meshwright", "collective", kind, "--mesh", mesh, "--axis", ",".join(move.axes)]
        return shlex.join([*words, "--on", str(found.system), "--bytes", str(move.bytes)])
    result = found.inference.result
    dims = ",".join(f"{dim}={sizes.dims[dim]}" for dim in result.dims)
    return shlex.join(["meshwright", "show", str(result), "--mesh", mesh, "--dims", dims, "--dtype", args.dtype])
