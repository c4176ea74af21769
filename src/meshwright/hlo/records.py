"""The record of an HLO module, in the terms of a plan."""

from __future__ import annotations

import math
from collections.abc import Mapping

from meshwright.errors import MeshwrightError
from meshwright.hlo.collectives import ProgramCollectives, read_collectives
from meshwright.hlo.flops import count_flops
from meshwright.hlo.groups import MAX_DEVICES
from meshwright.hlo.module import Module, contradictions_as_errors
from meshwright.hlo.parser import parse_hlo
from meshwright.hlo.tally import Tally
from meshwright.record import Record


def read_hlo(text: str, mesh: Mapping[str, int], *, hardware: str) -> Record:
    """The record of a program from HLO text alone: flops by phase and collectives, per device.

    mesh: every axis and its degree in device order, outermost first. `breakdown_seconds` and memory stay empty. Raises
    where the text is not HLO, contradicts itself, or is for another number of devices.
    """
    return read_module(parse_hlo(text), mesh, hardware=hardware)


def read_module(module: Module, mesh: Mapping[str, int], *, hardware: str) -> Record:
    """`read_hlo` of a parsed module."""
    with contradictions_as_errors(module):
        _check_devices(module, mesh)
        flops, traffic = count_flops(module), read_collectives(module, mesh)
        total = float(flops.total)
    return Record(
        origin="compiled",
        mesh=dict(mesh),
        hardware=hardware,
        flops=total,
        collectives=traffic.collectives,
        notes=_notes(flops, traffic),
    )


def _check_devices(module: Module, mesh: Mapping[str, int]) -> None:
    num_devices = math.prod(mesh.values())
    if num_devices > MAX_DEVICES:
        raise MeshwrightError(f"a mesh of {num_devices} devices is larger than any system; the most are {MAX_DEVICES}")
    if module.num_devices != num_devices:
        shown = ",".join(f"{axis}={degree}" for axis, degree in mesh.items() if degree > 1) or "of one device"
        raise MeshwrightError(
            f"HLO module {module.name} runs on {module.num_devices} devices; mesh {shown} has {num_devices}"
        )


def _notes(flops: Tally, traffic: ProgramCollectives) -> tuple[str, ...]:
    """Notes on flops and collectives, each once; recomputed flops, as a record has no field for them."""
    again = flops.by_phase.get("recompute", 0)
    recomputed = (f"{again:.4g} of the flops are recomputed",) if again else ()
    return tuple(dict.fromkeys((*recomputed, *flops.notes, *traffic.notes)))
