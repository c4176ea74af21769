"""The record of a compiled program: what the compiler will really run, in the terms a plan predicts it in."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from meshwright.compiled.between_slices import collectives_between_slices
from meshwright.compiled.collectives import Traffic, read_collectives
from meshwright.compiled.flops import count_flops
from meshwright.compiled.groups import MOST_DEVICES
from meshwright.compiled.hlo import Module, contradictions
from meshwright.compiled.optimized import read_optimized
from meshwright.compiled.parser import parse_hlo
from meshwright.compiled.program import CompiledProgram
from meshwright.compiled.tally import Tally
from meshwright.errors import MeshwrightError
from meshwright.hardware import System, parse_system
from meshwright.mesh import MeshShape
from meshwright.parallel.mesh import across_slices
from meshwright.record import Record


def read_program(program: CompiledProgram, mesh: MeshShape, hardware: str) -> Record:
    """The record of a program compiled for a mesh on some hardware: flops, memory and collectives, per device.

    `fits` is None on simulated CPU devices, whose memory is the host's. A collective over axes in slices and between is
    compiled as one of each. Raises where the program is for another number of devices.
    """
    system, module = parse_system(hardware), read_optimized(program)
    record = read_module(module, within_slice(system, mesh.layout), hardware=hardware)
    if system.num_slices > 1:
        across = dict(zip(mesh.layout, across_slices(mesh.layout, system.num_slices), strict=True))
        between = tuple(collectives_between_slices(module, across))
        said = tuple(note for note in record.notes if not note.startswith(("send:", "recv:")))
        record = replace(record, collectives=(*record.collectives, *between), notes=said)
    fits = program.memory_bytes["peak"] <= system.usable_bytes if system.chip.kind != "cpu" else None
    notes = (f"the mesh is laid out by {program.laid_by}",) if "split" in program.laid_by else ()
    return replace(
        record, mesh=mesh.layout, memory_bytes=dict(program.memory_bytes), fits=fits, notes=(*record.notes, *notes)
    )


def within_slice(system: System, mesh: Mapping[str, int]) -> dict[str, int]:
    """The degree of each axis inside a slice, each of which runs a program of its own that numbers its devices."""
    shares = across_slices(mesh, system.num_slices)
    return {axis: degree // share for (axis, degree), share in zip(mesh.items(), shares, strict=True)}


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
