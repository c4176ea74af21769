"""`meshwright matmul`: cost of a sharded matmul, all implementations, and the reasons."""

from __future__ import annotations

import itertools as it
import json
import math
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

from meshwright.cli.collective import KINDS
from meshwright.cli.kept import mesh_degrees
from meshwright.cli.typed import check_all_read
from meshwright.cli.waiting import waiting
from meshwright.cli.words.spell import spelled
from meshwright.description.hardware.dtypes import dtype_bytes
from meshwright.description.hardware.system import System, parse_system
from meshwright.description.notation.inference import Inference, infer
from meshwright.description.notation.legality import Sizes
from meshwright.description.notation.parser import parse, parse_numbers
from meshwright.description.notation.steps import Communicate
from meshwright.errors import MeshwrightError
from meshwright.options.declare import Json, option, positional
from meshwright.options.values import read_count
from meshwright.pictures.tables import console, show, table
from meshwright.pictures.text import folded, next_line, terms, wrap
from meshwright.planning.cost.rates.product import PricedImplementation, PricedProduct, price
from meshwright.planning.cost.threshold import say_threshold
from meshwright.record import Collective
from meshwright.units import show_bytes, show_flops, show_seconds

if TYPE_CHECKING:
    from meshwright.execution.runtime.modes import Mode
    from meshwright.proof.verification.products import ProductCheck

LARGEST = 256
"""The size to which `--run` cuts larger dims, for simulated devices."""

MOST_DEVICES = 64
"""The most devices that `--run` simulates: more is too much for a laptop's threads."""


EXAMPLES = (
    'meshwright matmul "A[B_X, D] @ W[D_X, F] -> C[B_X, F]" --mesh X=8 --dims B=65536,D=8192,F=32768 --on v5p:2x2x2',
    'meshwright matmul "B M_x @ M_x E = B E -> RS over x -> B E_x" --mesh x=4 --dims B=1024,M=8192,E=8192 --on v6e:4x4',
)


@dataclass(frozen=True)
class Args:
    """The case of a sharded product, the collectives it needs, every way to do it priced on a chip, and what binds."""

    product: Annotated[str, positional("PRODUCT")]
    """The product or resharding, in the notation (or MaxText's); the result wanted may be left out."""
    mesh: Annotated[str, option("MESH")]
    """The degree of every mesh axis, outermost first, as X=4,Y=2; or a plan.yaml or a run, for its mesh. Needed."""
    dims: Annotated[str, option("DIMS")]
    """The size of every dim, as B=65536,D=8192,F=32768. Needed."""
    on: Annotated[str, option("CHIPS")]
    """The hardware, as v5p:2x2x2 or h100:8. Needed."""
    dtype: Annotated[str, option("DTYPE")] = "bf16"
    """The type of the elements: bf16, f32, int8, … Default: bf16."""
    top: Annotated[str, option("N")] = "6"
    """How many ways to print. Default: 6."""
    run: Annotated[bool, option()] = False
    """Do it on simulated devices too, in every mode of JAX, and compare the compiled collectives (dims cut to 256)."""
    json: Json = False
    """Print {"case", "result", "collectives", "local_shapes", …, "alternatives"} instead; with --run, "run" too."""


def run(args: Args) -> int:
    """Compute the cost of the matmul, print it, and run it if asked."""
    is_run = args.run
    degrees = mesh_degrees(args.mesh)
    sizes = Sizes(degrees=degrees, dims=parse_numbers(args.dims), element_bytes=dtype_bytes(args.dtype))
    inference, system = infer(parse(args.product, axes=degrees), sizes), parse_system(args.on)
    there = {dim for array in (*inference.operands, inference.result) for dim in array.dims}
    if unknown := [dim for dim in sizes.dims if dim not in there]:
        raise MeshwrightError(f"--dims names {unknown[0]}, which is no dim of {args.product}; leave it out")
    top = None if args.json else read_count("--top", args.top)
    check_all_read(args, "beside --json" if top is None else "here")
    priced = price(inference, system, dtype=args.dtype)
    if is_run and sizes.degree(degrees) > MOST_DEVICES:
        raise MeshwrightError(
            f"--run simulates up to {MOST_DEVICES} devices; {args.mesh} are {sizes.degree(degrees)}, take fewer"
        )
    if top is not None:
        _print(args, priced, system, top)
    executed = None
    if is_run:
        with waiting("running it on simulated devices"):
            executed = _execute(_small(priced))
    if top is None:
        print(json.dumps(priced.to_json() | ({"run": executed.to_json()} if executed else {}), indent=2))
    else:
        if executed:
            _print_run(executed)
        print(next_line(_next(args, priced)))
    return 0


def _next(args: Args, priced: PricedProduct) -> str:
    """Return the next command: `--run`; after that the longest collective of way 1, or `show` where there is none."""
    sizes, moves = priced.inference.sizes, priced.chosen.collectives
    if not args.run and sizes.degree(sizes.degrees) <= MOST_DEVICES:
        return spelled("matmul", args, without=("top",), run=True)
    if moves:
        move = max(moves, key=lambda move: move.seconds or 0.0)
        kind = next(word for word, kind in KINDS.items() if kind == move.kind)
        words = ["meshwright", "collective", kind, "--mesh", args.mesh, "--axis", ",".join(move.axes)]
        return shlex.join([*words, "--on", args.on, "--bytes", str(move.bytes)])
    result = priced.inference.result
    dims = ",".join(f"{dim}={sizes.dims[dim]}" for dim in result.dims)
    return shlex.join(["meshwright", "show", str(result), "--mesh", args.mesh, "--dims", dims, "--dtype", args.dtype])


def _print(args: Args, priced: PricedProduct, system: System, top: int) -> None:
    """Print the case first, then the implementations, cheapest first, then the reasons."""
    inference = priced.inference
    show(console(), f"{args.product}   {args.mesh} on {system}")
    print()
    if inference.case is None:
        case = "a resharding: nothing is multiplied"
    else:
        reasons = "; ".join(f"{found.reason}" for found in inference.cases) or "no axis splits an operand"
        case = f"case {inference.case}: {reasons}"
    show(console(), f"  {case}", style="bold")
    print()
    ways = [priced.chosen, *priced.alternatives]
    rows = [row for place, way in enumerate(ways[:top], start=1) for row in _rows(place, way)]
    show(console(), table(("", "steps", "network", "", "product", "together", "bound by"), rows, left=(1, 6), folds=1))
    if len(ways) > top:
        print(f"\n  {len(ways) - top} more ways; --top {len(ways)} prints them")
    print()
    if priced.chosen.collectives and priced.chosen.implementation.flops:
        serial = show_seconds(priced.chosen.serial_seconds)
        print(
            folded(
                f"together: all collectives run beside the product, and the longest decides (full overlap); one after"
                f" the other, way 1 takes {serial}"
            )
        )
    print(folded(f"elements are {args.dtype} (--dtype)"))
    print()
    print("\n".join(_why(priced)))


def _rows(place: int, priced: PricedImplementation) -> Iterator[tuple[str, ...]]:
    """Yield the rows of an implementation, one for each step; the first has the times of the whole."""
    product = show_seconds(max(priced.flops_seconds, priced.memory_seconds))
    first = (product, show_seconds(priced.seconds), priced.bound or "nothing")
    collectives = iter(priced.collectives)
    for number, step in enumerate(priced.implementation.steps):
        amounts = ("", "")
        if isinstance(step, Communicate):
            move = next(collectives)
            amounts = (show_bytes(move.bytes), show_seconds(move.seconds or 0.0))
        yield ("" if number else str(place), str(step), *amounts, *(("", "", "") if number else first))


def _why(priced: PricedProduct) -> list[str]:
    """Return lines on local shapes, flops, intensities, the bound and its threshold."""
    chosen, inference = priced.chosen, priced.inference
    shapes = {
        str(array): str(list(inference.sizes.local_shape(array))) for array in (*inference.operands, inference.result)
    }
    lines = [terms("local", shapes)]
    if chosen.implementation.flops:
        repeated = chosen.implementation.repeated_axes
        again = f", the same work on every device of {', '.join(repeated)}" if repeated else ""
        lines.append(f" flops   {show_flops(chosen.implementation.flops)} a device{again}")
    for name, found in (("network", chosen.network), ("memory", chosen.memory)):
        if found:
            dims = f"{found.dims} = " if found.dims else ""
            lines += wrap(
                f"{name} intensity {dims}{found.value:.0f} flops a byte; hardware intensity {found.hardware:.0f}",
                first=" ",
                then="  ",
            )
    if chosen.bound:
        threshold = say_threshold(chosen.threshold) if chosen.threshold else ""
        lines += wrap("; ".join(filter(None, (f"{chosen.bound} bound", threshold))), first=" ", then="  ")
    return lines + [folded(f"note: {note}") for note in priced.layout.notes]


@dataclass(frozen=True)
class _Run:
    """A run of the cheapest implementation: its dims and mesh, and the outcome in each mode."""

    inference: Inference
    checks: Mapping[Mode, ProductCheck]

    def to_json(self) -> dict[str, Any]:
        """Return the run as plain data: the dims that were run, and the fields of `ProductCheck` for each mode."""
        modes = {
            mode: {
                "error": check.error,
                "is_as_inferred": check.is_as_inferred,
                "inferred": [_in_short(move) for move in check.inferred],
                "compiled": [_in_short(move) for move in check.compiled],
            }
            for mode, check in self.checks.items()
        }
        return {"dims": dict(self.inference.sizes.dims), "modes": modes}


def _small(priced: PricedProduct) -> Inference:
    """Return the cheapest implementation in float32, with dims of about `LARGEST` that its mesh axes still divide."""
    inference, way = priced.inference, priced.chosen.implementation
    arrays = [*inference.operands, *(step.result for step in way.steps)]
    dims = {}
    for dim, size in inference.sizes.dims.items():
        unit = math.lcm(*(inference.sizes.degree(array.axes_of(dim)) for array in arrays))
        dims[dim] = min(size, max(LARGEST // unit, 1) * unit)
    sizes = replace(inference.sizes, dims=dims, element_bytes=dtype_bytes("f32"))
    steps = tuple(
        replace(step, bytes=sizes.local_bytes(step.counted)) if isinstance(step, Communicate) else step
        for step in way.steps
    )
    return replace(inference, sizes=sizes, implementations=(replace(way, steps=steps),), written=None)


def _execute(inference: Inference) -> _Run:
    """Run the implementation on simulated devices in every mode of JAX."""
    from meshwright.execution.runtime.devices import claim_devices

    claim_devices(parse_system(f"cpu:{math.prod(inference.sizes.degrees.values())}"))
    from meshwright.execution.runtime.modes import MODES
    from meshwright.proof.verification.products import check_product

    return _Run(inference, {mode: check_product(inference, mode=mode) for mode in MODES})


def _print_run(executed: _Run) -> None:
    """Print for each mode and collective: the largest error, and the inferred and compiled collectives side by side."""
    from meshwright.description.hlo.versions import untested_notes

    sizes = executed.inference.sizes
    dims = ",".join(f"{dim}={size}" for dim, size in sizes.dims.items())
    count = sizes.degree(sizes.degrees)
    print()
    show(console(), f" way 1, run on {count} simulated devices in float32, dims cut to {LARGEST}: {dims}")
    print()
    rows = [row for mode, check in executed.checks.items() for row in _run_rows(mode, check)]
    show(console(), table(("mode", "error", "inferred", "compiled", ""), rows, left=(0, 2, 3, 4), folds=-1))
    for note in untested_notes():
        print(folded(f"note: {note}"))


def _run_rows(mode: str, check: ProductCheck) -> Iterator[tuple[str, ...]]:
    """Yield the rows of a mode; in overlapped mode a ring of permutes replaces a collective."""
    verdict = "as inferred" if check.is_as_inferred else "NOT AS INFERRED"
    error = f"{check.error:.1e}" if check.error else "0"
    moves = it.zip_longest(*([_kind(move) for move in moves] or ["none"] for moves in (check.inferred, check.compiled)))
    for number, (inferred, compiled) in enumerate(moves):
        first = (mode, error) if number == 0 else ("", "")
        yield (*first, inferred or "", compiled or "", "" if number else "; ".join((verdict, *check.notes)))


def _kind(move: Collective) -> str:
    """Return a collective in a few words."""
    return f"{move.kind} {'*'.join(move.axes)} {show_bytes(move.bytes)}"


def _in_short(move: Collective) -> dict[str, Any]:
    """Return a collective as plain data."""
    return {"kind": move.kind, "axes": list(move.axes), "bytes": move.bytes}
