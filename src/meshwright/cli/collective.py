"""`meshwright collective`: the time of one collective on a fabric, and its effect on real numbers."""

from __future__ import annotations

import json
import statistics
import time
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from meshwright.cli.kept import mesh_degrees
from meshwright.cli.typed import check_all_read
from meshwright.cli.waiting import waiting
from meshwright.cli.words.spell import spelled
from meshwright.description.hardware.fabric import Placement, lay_mesh
from meshwright.description.hardware.system import System, parse_system
from meshwright.errors import MeshwrightError
from meshwright.options.declare import Json, option, positional
from meshwright.pictures.tables import console, show
from meshwright.pictures.text import folded, next_line, wrap
from meshwright.planning.cost.formulas import collective_formula
from meshwright.planning.cost.rates.collective import CollectiveTime, collective_seconds
from meshwright.record import Kind, wire_bytes
from meshwright.units import parse_count, show_bytes, show_rate, show_seconds

KINDS: dict[str, Kind] = {
    "all-gather": "all-gather",
    "reduce-scatter": "reduce-scatter",
    "all-reduce": "all-reduce",
    "all-to-all": "all-to-all",
    "permute": "collective-permute",
}

MOST_BYTES = 10**15
"""The largest --bytes that is accepted: more than any system has."""

MOST_SHOWN = 8
"""The most devices that `--run` shows: more would fill the screen."""

COUNTED: dict[Kind, str] = {
    "all-gather": "the gathered array",
    "reduce-scatter": "the array to be summed",
    "all-reduce": "the array to be summed",
    "all-to-all": "what a device holds",
    "collective-permute": "what a device holds",
}
"""The array whose bytes --bytes gives."""


EXAMPLES = (
    "meshwright collective all-gather --mesh X=4 --axis X --on v5e:4x4 --bytes 64M",
    "meshwright collective all-reduce --mesh X=8 --axis X --on cpu:8 --bytes 1M --bench",
    "meshwright collective reduce-scatter --mesh X=4 --axis X --on v5e:4x4 --bytes 64M --run",
)


@dataclass(frozen=True)
class Args:
    """The time of one collective on the links its mesh axes run over, and what decides it."""

    kind: Annotated[
        Literal["all-gather", "reduce-scatter", "all-reduce", "all-to-all", "permute"],
        positional("KIND"),
    ]
    """all-gather, reduce-scatter, all-reduce, all-to-all or permute."""
    mesh: Annotated[str, option("MESH")]
    """The degree of every mesh axis, outermost first, as X=4,Y=2; or a plan.yaml or a run, for its mesh. Needed."""
    axis: Annotated[str, option("AXIS")]
    """The mesh axis it runs over, or several, as X,Y. Needed."""
    on: Annotated[str, option("CHIPS")]
    """The hardware, as v5e:4x4 or h100:8. Needed."""
    bytes: Annotated[str, option("N")]
    """The bytes of the array as one device sees it, as 64M: gathered, or to be summed, or held. Needed."""
    run: Annotated[bool, option()] = False
    """Run it on small numbers on simulated devices and show them before and after; show its ring hop by hop."""
    bench: Annotated[bool, option()] = False
    """Time it on this machine's devices, beside the model."""
    json: Json = False
    """Print the answer as data."""


def run(args: Args) -> int:
    """Compute the time of the collective; run it or time it if asked."""
    degrees, axes = mesh_degrees(args.mesh), tuple(axis.strip() for axis in args.axis.split(","))
    system, nbytes = parse_system(args.on), _read_bytes(args.bytes)
    if len(set(axes)) < len(axes):
        raise MeshwrightError(f"--axis {args.axis} names an axis twice; a collective runs over each once")
    as_json, is_bench = args.json, args.bench
    is_shown = False if as_json else args.run
    check_all_read(args, "beside --json" if as_json else "here")
    layout = lay_mesh(system, degrees)
    placement = layout.placement(axes)
    found = collective_seconds(KINDS[args.kind], nbytes, placement)
    measured = None
    if is_bench:
        with waiting(f"timing it on {system}"):
            measured = _bench(args, system, degrees, axes, nbytes)
    if as_json:
        print(json.dumps(_data(found, placement, measured), indent=2))
        return 0
    _print(args, found, placement, layout.notes)
    if measured is not None:
        _print_measured(found, placement, measured)
    if is_shown:
        _show(args.kind, placement.degree)
    if is_shown or placement.degree > MOST_SHOWN:
        print(next_line(f"meshwright chips {system.chip.name}", note="its links, with their source"))
    else:
        print(next_line(spelled("collective", args, run=True)))
    return 0


def _read_bytes(text: str) -> int:
    """Parse a number of bytes."""
    try:
        found = parse_count(text)
    except MeshwrightError:
        found = 0
    if not 0 < found <= MOST_BYTES:
        raise MeshwrightError(f"--bytes is {text!r}; it is a whole number from 1 to 1,000T, as 64k, 64Mi or 4G")
    return found


def _data(found: CollectiveTime, placement: Placement, measured: float | None) -> dict[str, Any]:
    """Return the answer as plain data."""
    answer: dict[str, Any] = {
        "kind": found.kind,
        "axes": list(placement.axes),
        "degree": placement.degree,
        "bytes": found.bytes,
        "wire_bytes": wire_bytes(found.kind, found.bytes, placement.degree),
        "seconds": found.seconds,
        "bandwidth_seconds": found.bandwidth_seconds,
        "latency_seconds": found.latency_seconds,
        "regime": found.regime,
        "placement": str(placement),
        "binds": found.binds,
    }
    return answer | ({"measured_seconds": measured} if measured is not None else {})


def _print(args: Args, found: CollectiveTime, placement: Placement, notes: tuple[str, ...]) -> None:
    """Print the time, then how it is computed."""
    sent = wire_bytes(found.kind, found.bytes, placement.degree)
    over = f"{args.kind} over {'*'.join(placement.axes)} = {placement.degree} on {args.on}"
    show(console(), f"{over}   {placement}")
    print()
    show(console(), f"  {show_seconds(found.seconds)}, decided by {found.binds or 'nothing: one device'}", style="bold")
    print()
    sizes = f"{show_bytes(found.bytes)}, {COUNTED[found.kind]}; in a ring each device sends {show_bytes(sent)}"
    print("\n".join(wrap(sizes, first=" bytes      ", then=INDENT)))
    for number, term in enumerate(found.terms):
        formula, numbers = collective_formula(found.kind, term, placement)
        rate = next(value for name, value in numbers.items() if name in ("B", "W"))
        values = "".join(f", {name} = {show_rate(n, 'B/s') if name in 'BW' else n}" for name, n in numbers.items())
        # What goes through the links is the product of the two numbers beside it.
        through = f"{show_bytes(term.seconds * rate)} at {show_rate(rate, 'B/s')} = {show_seconds(term.seconds)}"
        print(
            "\n".join(wrap(f"{through}, through {term.text}", first=f" {'' if number else 'links':<10} ", then=INDENT))
        )
        print("\n".join(wrap(f"{formula}: V the bytes{values}", first=INDENT, then=INDENT)))
    hops = f"{show_seconds(found.latency_seconds)}, all hops however small the array"
    print("\n".join(wrap(hops, first=" latency    ", then=INDENT)))
    for note in notes:
        print(folded(f"note: {note}"))


INDENT = " " * 12
"""The indentation of the second column of the screen."""


def _bench(args: Args, system: System, degrees: dict[str, int], axes: tuple[str, ...], nbytes: int) -> float:
    """Return the median time of the collective on this machine's devices, in float32, after one run that compiles."""
    from meshwright.execution.runtime.devices import claim_devices
    from meshwright.execution.runtime.single_collective import build_collective

    claim_devices(system)
    exchange, array = build_collective(KINDS[args.kind], degrees, axes, nbytes)
    exchange(array).block_until_ready()
    times = []
    for _ in range(7):
        began = time.perf_counter()
        exchange(array).block_until_ready()
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def _print_measured(found: CollectiveTime, placement: Placement, measured: float) -> None:
    """Print measured beside predicted: times and bytes that each device sends."""
    sent = wire_bytes(found.kind, found.bytes, placement.degree)
    ratio = f"{measured / found.seconds:.2f} x predicted" if found.seconds else "predicted: no time on one device"
    print(f"\n measured   {show_seconds(measured)}, {ratio}")
    for name, seconds in (("measured", measured), ("predicted", found.seconds)):
        if seconds:
            print(f" {name:<11}{show_rate(sent / seconds, 'B/s')} sent by each device")


def _show(kind: str, degree: int) -> None:
    """Run the collective on small numbers on simulated devices and print it, with its ring if it has one."""
    from meshwright.pictures.collectives import DIGITS
    from meshwright.pictures.showing import show_collective, show_ring

    if degree > MOST_SHOWN:
        raise MeshwrightError(
            f"--run shows up to {MOST_SHOWN} devices; {degree} would fill the screen: take a smaller mesh"
        )
    name = KINDS[kind]
    with waiting("running it on simulated devices"):
        from meshwright.execution.runtime.devices import claim_devices

        claim_devices(parse_system(f"cpu:{degree}"))
        # Each device's part is cut again into one for every device.
        values = DIGITS if len(DIGITS) % degree**2 == 0 else tuple(range(degree**2))
        pictures = [show_collective(name, values, degree=degree)]
        if name != "collective-permute":
            pictures.append(show_ring(name, values, degree=degree))
    for picture in pictures:
        print()
        console().print(picture, soft_wrap=True)
