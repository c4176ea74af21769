"""The record of an HLO module: what it really runs, in the terms a plan predicts it in."""

from __future__ import annotations

import math
from collections.abc import Mapping

from meshwright.errors import MeshwrightError
from meshwright.hlo.collectives import Traffic, read_collectives
from meshwright.hlo.flops import count_flops
from meshwright.hlo.groups import MOST_DEVICES
from meshwright.hlo.module import Module, contradictions
from meshwright.hlo.parser import parse_hlo
from meshwright.hlo.tally import Tally
from meshwright.record import Record


def read_hlo(text: str, mesh: Mapping[str, int], *, hardware: str) -> Record:
    """The record of a program as HLO text alone says it: flops by phase and collectives, per device.

    mesh: every axis and its degree in the order the devices are laid out in, outermost first. `breakdown_seconds` and
    memory stay empty. Raises where the text is no HLO, contradicts itself, or is for another number of devices.
    """
    return read_module(parse_hlo(text), mesh, hardware=hardware)


def read_module(module: Module, mesh: Mapping[str, int], *, hardware: str) -> Record:
    """The record of a module that is read already; see `read_hlo`."""
    with contradictions(module):
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
    """Raise where a module runs on another number of devices than a mesh has."""
    num_devices = math.prod(mesh.values())
    if num_devices > MOST_DEVICES:
        raise MeshwrightError(f"a mesh of {num_devices} devices is larger than any system; the most are {MOST_DEVICES}")
    if module.num_devices != num_devices:
        shown = ",".join(f"{axis}={degree}" for axis, degree in mesh.items() if degree > 1) or "of one device"
        raise MeshwrightError(
            f"HLO module {module.name} runs on {module.num_devices} devices; mesh {shown} has {num_devices}"
        )


def _notes(flops: Tally, traffic: Traffic) -> tuple[str, ...]:
    """What there is to say of both, each thing once; recomputed flops by name, as they are no field of a record."""
    again = flops.by_phase.get("recompute", 0)
    recomputed = (f"{again:.4g} of the flops are recomputed",) if again else ()
    return tuple(dict.fromkeys((*recomputed, *flops.notes, *traffic.notes)))
