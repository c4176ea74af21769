"""The `Record` of an HLO module, with the fields of a plan's record."""

from __future__ import annotations

import math
from collections.abc import Mapping

from meshwright.description.hlo.collectives import read_collectives
from meshwright.description.hlo.dcn import dcn_collectives
from meshwright.description.hlo.flops import count_flops
from meshwright.description.hlo.groups import MAX_DEVICES
from meshwright.description.hlo.module import Module, contradictions_as_errors
from meshwright.description.hlo.parser import parse_hlo
from meshwright.errors import MeshwrightError
from meshwright.record import Record


def read_hlo(text: str, mesh: Mapping[str, int], *, hardware: str) -> Record:
    """Return the record of a program from HLO text alone: flops and collectives, per device and step.

    Memory and `breakdown_seconds` are empty.

    Args:
        mesh: every axis and its degree in device order, outermost first.

    Raises:
        MeshwrightError: the text is not HLO, contradicts itself, or is for another number of devices.
    """
    return read_module(parse_hlo(text), mesh, hardware=hardware)


def read_module(
    module: Module, mesh: Mapping[str, int], *, hardware: str, across: Mapping[str, int] | None = None
) -> Record:
    """Return the record of a parsed module, as `read_hlo` does.

    across: for each mesh axis, the number of slices that it extends over. If given, the module is the program of one
    slice, `mesh` has the degrees inside a slice, and sends are read as collectives between slices.
    """
    with contradictions_as_errors(module):
        num_devices = math.prod(mesh.values())
        if num_devices > MAX_DEVICES:
            raise MeshwrightError(
                f"a mesh of {num_devices} devices is larger than any system; the most are {MAX_DEVICES}"
            )
        if module.num_devices != num_devices:
            shown = ",".join(f"{axis}={degree}" for axis, degree in mesh.items() if degree > 1) or "of one device"
            raise MeshwrightError(
                f"HLO module {module.name} runs on {module.num_devices} devices; mesh {shown} has {num_devices}"
            )
        flops, found = count_flops(module), read_collectives(module, mesh)
        total = float(flops.total)
        between = tuple(dcn_collectives(module, across)) if across else ()
    recomputed = flops.by_phase.get("recompute", 0)
    return Record(
        origin="compiled",
        mesh=dict(mesh),
        hardware=hardware,
        flops=total,
        collectives=(*found.collectives, *between),
        notes=tuple(
            dict.fromkeys(
                (
                    *([f"{recomputed / total:.1%} of the flops are recomputed"] if recomputed else []),
                    *flops.notes,
                    *found.notes,
                    *(
                        f"{opcode}: {count} a step, not among the collectives"
                        for opcode, count in found.uncounted.items()
                        if across is None or opcode not in ("send", "recv")
                    ),
                )
            )
        ),
    )
