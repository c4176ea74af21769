"""`meshwright collective`: what one collective takes on a fabric, and what it does to real numbers."""

from __future__ import annotations

import json
import math
import statistics
import time
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import tyro

from meshwright.cli.arguments import Json, option, positional
from meshwright.cost import CollectiveTime, Term, collective_seconds
from meshwright.errors import MeshwrightError
from meshwright.hardware import Crossing, Placement, System, lay_mesh, parse_system
from meshwright.notation import parse_numbers
from meshwright.record import Kind, wire_bytes
from meshwright.units import parse_count, show_bytes, show_rate, show_seconds

KINDS: dict[str, Kind] = {
    "all-gather": "all-gather",
    "reduce-scatter": "reduce-scatter",
    "all-reduce": "all-reduce",
    "all-to-all": "all-to-all",
    "permute": "collective-permute",
}

COUNTED: dict[Kind, str] = {
    "all-gather": "the gathered array",
    "reduce-scatter": "the array to be summed",
    "all-reduce": "the array to be summed",
    "all-to-all": "what a device holds",
    "collective-permute": "what a device holds",
}
"""What --bytes are those of."""


EXAMPLES = (
    "meshwright collective all-gather --mesh X=4 --axis X --on v5e:4x4 --bytes 64M",
    "meshwright collective all-reduce --mesh X=8 --axis X --on cpu:8 --bytes 1M --bench",
    "meshwright collective reduce-scatter --mesh X=4 --axis X --on v5e:4x4 --bytes 64M --run",
)


@dataclass(frozen=True)
class Args:
    """The time of one collective on the links its mesh axes run over, and what decides it."""

    kind: Annotated[
        tyro.conf.Positional[Literal["all-gather", "reduce-scatter", "all-reduce", "all-to-all", "permute"]],
        positional("KIND"),
    ]
    """all-gather, reduce-scatter, all-reduce, all-to-all or permute."""
    mesh: Annotated[str, option("MESH")]
    """The degree of every mesh axis, outermost first, as X=4,Y=2. Needed."""
    axis: Annotated[str, option("AXIS")]
    """The mesh axis it runs over, or several, as X,Y. Needed."""
    on: Annotated[str, option("CHIPS")]
    """The hardware, as v5e:4x4 or h100:8. Needed."""
    bytes: Annotated[str, option("N")]
    """The bytes of the array as one device sees it, as 64M: gathered, or to be summed, or held. Needed."""
    run: Annotated[bool, option()] = False
    """Show what it does to small numbers, before and after, on simulated devices; and its ring, hop by hop."""
    bench: Annotated[bool, option()] = False
    """Time it on the devices that are there, beside the model."""
    json: Json = False
    """Print the answer as data."""


def run(args: Args) -> int:
    """Price the collective; show or time it where that is asked for."""
    degrees, axes = parse_numbers(args.mesh), tuple(axis.strip() for axis in args.axis.split(","))
    system, nbytes = parse_system(args.on), parse_count(args.bytes)
    if len(set(axes)) < len(axes):
        raise MeshwrightError(f"--axis {args.axis} names an axis twice; a collective runs over each once")
    layout = lay_mesh(system, degrees)
    placement = layout.placement(axes)
    found = collective_seconds(KINDS[args.kind], nbytes, placement)
    measured = _bench(args, system, degrees, axes, nbytes) if args.bench else None
    if args.json:
        print(json.dumps(_data(found, placement, measured), indent=2))
        return 0
    _print(args, found, placement, layout.notes)
    if measured is not None:
        _print_measured(found, placement, measured)
    if args.run:
        _show(args.kind, placement.degree)
    return 0


def _data(found: CollectiveTime, placement: Placement, measured: float | None) -> dict[str, Any]:
    """The answer as plain data."""
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
    """The time first, then the way it comes about."""
    sent = wire_bytes(found.kind, found.bytes, placement.degree)
    print(f"{args.kind} over {'*'.join(placement.axes)} = {placement.degree} on {args.on}   {placement}\n")
    print(f"  {show_seconds(found.seconds)}, decided by {found.binds or 'nothing: one device'}\n")
    print(
        f" bytes      {show_bytes(found.bytes)}, {COUNTED[found.kind]}; in a ring each device sends {show_bytes(sent)}"
    )
    for number, term in enumerate(found.terms):
        formula, numbers = formula_of(found.kind, term, placement)
        values = "".join(f", {name} = {show_rate(n, 'B/s') if name in 'BW' else n}" for name, n in numbers.items())
        print(f" {'' if number else 'bandwidth':<10} {show_seconds(term.seconds)} in {term.text}")
        print(f"            {formula}, V the bytes{values}")
    print(f" latency    {show_seconds(found.latency_seconds)}, all hops however small the array")
    for note in notes:
        print(f" note: {note}")


def formula_of(kind: Kind, term: Term, placement: Placement) -> tuple[str, dict[str, float]]:
    """The formula of a term of a collective's time, in Python's signs, and its numbers by name but V, the bytes.

    n: devices (chips, on a torus), D: units of a level, s: groups that share its links, m: devices of a group in one
    unit. B: the links of the device worst placed on a torus, W: those of a unit; bytes a second one way. Source: as
    `cost.collective`.
    """
    crossing = next((crossing for crossing in placement.crossings if crossing.level == term.link), None)
    text, numbers = _on_level(kind, placement, crossing) if crossing else _on_torus(kind, placement)
    return ("2 * " if kind == "all-reduce" else "") + text, numbers


def _on_level(kind: Kind, placement: Placement, crossing: Crossing) -> tuple[str, dict[str, float]]:
    """The formula at one level of switches."""
    bytes_sent, shared = ("V * s", {"s": crossing.sharers}) if crossing.sharers > 1 else ("V", {})
    rate = {"W": crossing.link_bytes_per_second}
    if kind == "collective-permute":
        return f"{bytes_sent} / W", shared | rate
    if kind == "all-to-all":
        numbers = {"m": crossing.members, "n": placement.degree}
        return f"{bytes_sent} * m * (n - m) / (n * W)", numbers | shared | rate
    return f"{bytes_sent} * (D - 1) / (D * W)", {"D": crossing.degree} | shared | rate


def _on_torus(kind: Kind, placement: Placement) -> tuple[str, dict[str, float]]:
    """The formula on a torus: an open line has one link where a ring has two, and an all-to-all its slowest axis."""
    rates = {ring: ring.link_bytes_per_second * (2 if ring.is_wrapped else 1) for ring in placement.rings}
    if kind == "collective-permute":
        return "V / B", {"B": min(ring.link_bytes_per_second for ring in rates)}
    if kind == "all-to-all":
        slowest = max(rates, key=lambda ring: (ring.size**2 // 4) / ring.size / rates[ring])
        many = {"m": placement.chip_members} if placement.chip_members > 1 else {}
        return f"V{' * m' if many else ''} * (n**2 // 4) / (n * B)", {"n": slowest.size} | many | {"B": rates[slowest]}
    size, rate = math.prod(ring.size for ring in rates), sum(rates.values())
    is_ring = len(rates) == 1 and placement.rings[0].is_wrapped
    return "V * 2 * (n // 2) / (n * B)" if is_ring else "V * (n - 1) / (n * B)", {"n": size, "B": rate}


def _bench(args: Args, system: System, degrees: dict[str, int], axes: tuple[str, ...], nbytes: int) -> float:
    """The median time of the collective on the devices that are there, float32, after one run that compiles."""
    from meshwright.runtime import build_collective, claim_devices

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
    """Achieved beside modelled: times, and the bytes that each device sends in them."""
    sent = wire_bytes(found.kind, found.bytes, placement.degree)
    ratio = f"{measured / found.seconds:.2f} x the model" if found.seconds else "the model has no time for one device"
    print(f"\n measured   {show_seconds(measured)}, {ratio}")
    for name, seconds in (("achieved", measured), ("model", found.seconds)):
        if seconds:
            print(f" {name:<11}{show_rate(sent / seconds, 'B/s')} sent by each device")


def _show(kind: str, degree: int) -> None:
    """The collective on small numbers, really run on simulated devices, and its ring where it has one."""
    from meshwright.viz import show_collective, show_ring

    if degree > 8:
        raise MeshwrightError(f"--run shows up to 8 devices; {degree} would fill the screen: take a smaller mesh")
    from meshwright.runtime import claim_devices

    claim_devices(parse_system(f"cpu:{degree}"))
    name = KINDS[kind]
    print(f"\n{show_collective(name, degree=degree)}")
    if name != "collective-permute":
        print(f"\n{show_ring(name, degree=degree)}")
