"""`meshwright matmul`: what a sharded product costs, every way to do it, and why."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated

import tyro

from meshwright.cli.devices import claim_devices
from meshwright.cli.tables import console, show, table, terms
from meshwright.cost import PricedProduct, PricedWay, price
from meshwright.hardware import System, dtype_bytes, parse_system
from meshwright.notation import Communicate, Inference, Sizes, infer, parse, parse_numbers
from meshwright.record import Collective
from meshwright.units import show_bytes, show_flops, show_seconds


@dataclass(frozen=True)
class Args:
    """The case of a sharded product, the collectives it needs, every way to do it priced on a chip, and what binds.

    Example: meshwright matmul "A[B_X, D] @ W[D_X, F] -> C[B_X, F]" --mesh X=8
    --dims B=65536,D=8192,F=32768 --on v5p:2x2x2
    MaxText's spelling: meshwright matmul "B M_x @ M_x E = B E -> RS over x -> B E_x" --mesh x=4
    --dims B=1024,M=32768,E=8192 --on v6e:4x4
    """

    product: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="PRODUCT")]
    """The product or resharding, in the notation; the result wanted may be left out."""
    mesh: str
    """The degree of every mesh axis, outermost first, as X=4,Y=2."""
    dims: str
    """The size of every dim, as B=65536,D=8192,F=32768."""
    on: str
    """The hardware, as v5p:2x2x2 or h100:8."""
    dtype: str = "bf16"
    """The type of the elements: bf16, f32, int8, ..."""
    top: int = 6
    """The ways to print."""
    run: bool = False
    """Do it on simulated devices too, in every mode of JAX, and compare the compiled collectives (dims cut to 256)."""
    json: bool = False
    """Print {"case", "result", "collectives", "local_shapes", ..., "alternatives"} instead of the table."""


def run(args: Args) -> int:
    """Price the product, print it, and run it where that is asked for."""
    degrees = parse_numbers(args.mesh)
    sizes = Sizes(degrees=degrees, dims=parse_numbers(args.dims), element_bytes=dtype_bytes(args.dtype))
    inference, system = infer(parse(args.product, axes=degrees), sizes), parse_system(args.on)
    priced = price(inference, system, dtype=args.dtype)
    if args.json:
        print(json.dumps(priced.to_json(), indent=2))
    else:
        _print(args, priced, system)
    if args.run:
        _execute(args, degrees)
    return 0


def _print(args: Args, priced: PricedProduct, system: System) -> None:
    """The case first, then the ways, cheapest first, then why."""
    inference = priced.inference
    print(f"{args.product}   {args.mesh} on {system}\n")
    print(f"  {_case(inference)}\n")
    ways = [priced.chosen, *priced.alternatives]
    rows = [row for place, way in enumerate(ways[: args.top], start=1) for row in _rows(place, way)]
    show(console(), table(("", "steps", "network", "", "product", "together", "bound by"), rows, left=(1, 6)))
    if len(ways) > args.top:
        print(f"\n  {len(ways) - args.top} more ways; --top {len(ways)} prints them")
    print()
    for line in _why(priced):
        print(line)


def _case(inference: Inference) -> str:
    """The case in words."""
    if inference.case is None:
        return "a resharding: nothing is multiplied"
    reasons = "; ".join(f"{found.reason}" for found in inference.cases) or "no axis splits an operand"
    return f"case {inference.case}: {reasons}"


def _rows(place: int, priced: PricedWay) -> Iterator[tuple[str, ...]]:
    """The lines of a way, one for each of its steps; the first has its times."""
    product = show_seconds(max(priced.flops_seconds, priced.memory_seconds))
    first = (product, show_seconds(priced.seconds), priced.bound or "nothing")
    collectives = iter(priced.collectives)
    for number, step in enumerate(priced.way.steps):
        amounts = ("", "")
        if isinstance(step, Communicate):
            move = next(collectives)
            amounts = (show_bytes(move.bytes), show_seconds(move.seconds or 0.0))
        yield ("" if number else str(place), str(step), *amounts, *(("", "", "") if number else first))


def _why(priced: PricedProduct) -> list[str]:
    """Local shapes, flops, intensities, the verdict and from where it turns."""
    chosen, inference = priced.chosen, priced.inference
    shapes = {
        str(array): str(list(inference.sizes.local_shape(array))) for array in (*inference.operands, inference.result)
    }
    lines = [terms("local", shapes)]
    if chosen.way.flops:
        repeated = chosen.way.repeated_axes
        again = f", the same work on every device of {', '.join(repeated)}" if repeated else ""
        lines.append(f" flops   {show_flops(chosen.way.flops)} a device{again}")
    for name, found in (("network", chosen.network), ("memory", chosen.memory)):
        if found:
            dims = f"{found.dims} = " if found.dims else ""
            lines.append(
                f" {name} intensity {dims}{found.value:,.0f} flops a byte; the hardware's {found.hardware:,.0f}"
            )
    if chosen.bound:
        lines.append(f" {chosen.bound} bound; {chosen.threshold}" if chosen.threshold else f" {chosen.bound} bound")
    return lines + [f" note: {note}" for note in priced.layout.notes]


LARGEST = 256
"""The largest dim that `--run` gives simulated devices; larger ones are halved until they fit."""


def _execute(args: Args, degrees: dict[str, int]) -> None:
    """Run the product in every mode of JAX: its error against one device, its collectives beside those inferred."""
    claim_devices(parse_system(f"cpu:{math.prod(degrees.values())}"))
    from meshwright.compiled.products import check_product
    from meshwright.parallel.modes import MODES

    dims = {dim: _halved(size) for dim, size in parse_numbers(args.dims).items()}
    sizes = Sizes(degrees=degrees, dims=dims, element_bytes=4)
    inference = infer(parse(args.product, axes=degrees), sizes)
    shown = ", ".join(f"{dim}={size}" for dim, size in dims.items())
    print(f"\n run on {math.prod(degrees.values())} simulated devices, float32, {shown}: {inference.way}\n")
    rows = []
    for mode in MODES:
        found = check_product(inference, mode=mode)
        ring = "a ring, for" if mode == "overlapped" else "not as inferred:"
        verdict = "as inferred" if found.is_as_inferred else f"{ring} {_kinds(found.inferred)}"
        rows.append((mode, f"{found.error:.1e}", _kinds(found.compiled), verdict))
    show(console(), table(("mode", "error", "compiled", "collectives"), rows, left=(0, 2, 3)))


def _halved(size: int) -> int:
    """The size, halved until it is no larger than `LARGEST` or odd."""
    while size > LARGEST and size % 2 == 0:
        size //= 2
    return size


def _kinds(collectives: Sequence[Collective]) -> str:
    """Collectives in a few words."""
    return ", ".join(f"{c.kind} {'*'.join(c.axes)} {show_bytes(c.bytes)}" for c in collectives) or "none"
