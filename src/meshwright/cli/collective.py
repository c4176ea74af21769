"""`meshwright collective`: print `meshwright.collective`; optionally measure it, or run it on small numbers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from meshwright.cli.answers import print_answer
from meshwright.cli.kept import mesh_degrees
from meshwright.cli.typed import check_all_read
from meshwright.cli.waiting import waiting
from meshwright.cli.words.spell import spelled
from meshwright.description.hardware.system import parse_system
from meshwright.errors import MeshwrightError
from meshwright.options.declare import Json, option, positional
from meshwright.pictures.answers.collective import BYTES, KINDS, MOST_SHOWN, collective
from meshwright.pictures.tables import console
from meshwright.pictures.text import next_line
from meshwright.support.files import check_output

EXAMPLES = (
    "meshwright collective all-gather",
    "meshwright collective all-gather --mesh X=4 --axis X --on v5e:4x4 --bytes 64M",
    "meshwright collective all-reduce --mesh X=8 --axis X --on cpu:8 --bytes 1M --bench",
    "meshwright collective reduce-scatter --mesh X=4 --axis X --on v5e:4x4 --bytes 64M --run",
)


@dataclass(frozen=True)
class Args:
    """Predict the time of one collective on the links of its mesh axes, and show what limits it."""

    kind: Annotated[
        Literal["all-gather", "reduce-scatter", "all-reduce", "all-to-all", "permute"],
        positional("KIND"),
    ]
    """all-gather, reduce-scatter, all-reduce, all-to-all or permute."""
    mesh: Annotated[str | None, option("MESH")] = None
    """The degree of every mesh axis, outermost first, as X=4,Y=2; or a plan.yaml or a run. Default: X, all devices."""
    axis: Annotated[str | None, option("AXIS")] = None
    """The mesh axis that it runs over, or several, as X,Y. Default: all axes."""
    on: Annotated[str | None, option("CHIPS")] = None
    """The hardware, as v5e:4x4 or h100:8. Default: the devices of this machine."""
    bytes: Annotated[str | None, option("BYTES")] = None
    """Bytes on one device of the gathered array, the array to sum, or the part to exchange. Default: 64MB."""
    run: Annotated[bool, option()] = False
    """Run it on small numbers on simulated devices and show them before and after; show its ring hop by hop."""
    bench: Annotated[bool, option()] = False
    """Also measure its time on this machine's devices."""
    svg: Annotated[Path | None, option("FILE", "-o")] = None
    """Write a picture, before, hop by hop and after, to this file: as SVG, or as a page if its name ends in .html."""
    json: Json = False
    """Print the answer as data."""


def run(args: Args) -> int:
    """Print the time of the collective; with --run or --bench, run or measure it."""
    kind, as_json, is_bench = args.kind, args.json, args.bench
    mesh = None if args.mesh is None else mesh_degrees(args.mesh)
    axis, on, nbytes, svg = args.axis, args.on, args.bytes, args.svg
    if svg is not None:
        check_output(svg)
    is_shown = False if as_json else args.run
    check_all_read(args, "with --json" if as_json else "here")
    found = collective(kind, bytes=nbytes or BYTES, axis=axis, mesh=mesh, on=on)
    if is_bench:
        with waiting(f"timing it on {found.system}"):
            found = found.measure()
    print_answer(found, svg, as_json=as_json)
    if as_json:
        return 0
    if is_shown:
        _show(kind, found.degree)
    if is_shown or found.degree > MOST_SHOWN:
        print(next_line(f"meshwright chips {found.system.chip.name}", note="its links, with their source"))
    else:
        print(next_line(spelled("collective", args, without=("svg",), run=True)))
    return 0


def _show(kind: str, degree: int) -> None:
    """Run the collective on small numbers on simulated devices and print it, with its ring algorithm if it has one."""
    from meshwright.pictures.drawings.collectives import small_values
    from meshwright.pictures.showing import show_collective, show_ring

    if degree > MOST_SHOWN:
        raise MeshwrightError(
            f"--run shows up to {MOST_SHOWN} devices; {degree} would fill the screen: take a smaller mesh"
        )
    name = KINDS[kind]
    with waiting("running it on simulated devices"):
        from meshwright.execution.runtime.devices import claim_devices

        claim_devices(parse_system(f"cpu:{degree}"))
        values = small_values(degree)
        pictures = [show_collective(name, values, degree=degree)]
        if name != "collective-permute":
            pictures.append(show_ring(name, values, degree=degree))
    for picture in pictures:
        print()
        console().print(picture, soft_wrap=True)
