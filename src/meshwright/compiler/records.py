"""The record of a compiled program: what the compiler will really run, in the terms a plan predicts it in."""

from __future__ import annotations

from dataclasses import replace

from meshwright.compiler.optimized import read_optimized
from meshwright.compiler.program import CompiledProgram
from meshwright.hardware import parse_system
from meshwright.hlo import dcn_collectives, read_module
from meshwright.mesh import MeshShape
from meshwright.record import Record
from meshwright.runtime import across_slices, within_slice


def read_program(program: CompiledProgram, mesh: MeshShape, hardware: str) -> Record:
    """The record of a program compiled for a mesh on some hardware: flops, memory and collectives, per device.

    `fits` is None on simulated CPU devices, whose memory is the host's. A collective over axes in slices and between is
    compiled as one of each. Raises where the program is for another number of devices.
    """
    system, module = parse_system(hardware), read_optimized(program)
    record = read_module(module, within_slice(system, mesh.layout), hardware=hardware)
    if system.num_slices > 1:
        across = dict(zip(mesh.layout, across_slices(mesh.layout, system.num_slices), strict=True))
        between = tuple(dcn_collectives(module, across))
        said = tuple(note for note in record.notes if not note.startswith(("send:", "recv:")))
        record = replace(record, collectives=(*record.collectives, *between), notes=said)
    fits = program.memory_bytes["peak"] <= system.usable_bytes if system.chip.kind != "cpu" else None
    notes = (f"the mesh is laid out by {program.laid_by}",) if "split" in program.laid_by else ()
    return replace(
        record, mesh=mesh.layout, memory_bytes=dict(program.memory_bytes), fits=fits, notes=(*record.notes, *notes)
    )
