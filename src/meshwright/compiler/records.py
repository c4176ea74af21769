"""The record of a compiled program, in the terms of a plan."""

from __future__ import annotations

from dataclasses import replace

from meshwright.compiler.optimized import read_optimized
from meshwright.compiler.program import CompiledProgram, MeshMethod
from meshwright.hardware import across_slices, parse_system, within_slice
from meshwright.hlo import read_module
from meshwright.mesh import MeshShape
from meshwright.record import Record


def read_program(program: CompiledProgram, mesh: MeshShape, hardware: str) -> Record:
    """The record of a program compiled for a mesh on some hardware: flops, memory and collectives, per device.

    `fits` is None on simulated CPU devices, whose memory is the host's. A collective over axes within and between
    slices is compiled as one of each. Raises where the program is for another number of devices.
    """
    system, module = parse_system(hardware), read_optimized(program)
    record = read_module(
        module,
        within_slice(mesh.layout, system.num_slices),
        hardware=hardware,
        across=across_slices(mesh.layout, system.num_slices) if system.num_slices > 1 else None,
    )
    fits = program.memory_bytes["peak"] <= system.usable_bytes if system.chip.kind != "cpu" else None
    is_split = program.mesh_method == MeshMethod.SPLIT_PHYSICAL_AXES
    notes = (f"the mesh is laid out by {program.mesh_method}",) if is_split else ()
    return replace(
        record, mesh=mesh.layout, memory_bytes=dict(program.memory_bytes), fits=fits, notes=(*record.notes, *notes)
    )
