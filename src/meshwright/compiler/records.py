"""The record of a compiled program, in the terms of a plan."""

from __future__ import annotations

from dataclasses import replace

from meshwright.compiler.optimized import read_optimized
from meshwright.compiler.program import CompiledProgram, MeshMethod
from meshwright.hardware import parse_system
from meshwright.hlo import read_module
from meshwright.mesh import MeshShape
from meshwright.record import Record
from meshwright.runtime import across_slices, within_slice


def read_program(program: CompiledProgram, mesh: MeshShape, hardware: str) -> Record:
    """The record of a program compiled for a mesh on some hardware: flops, memory and collectives, per device.

    `fits` is None on simulated CPU devices, whose memory is the host's. A collective over axes within and between
    slices is compiled as one of each. Raises where the program is for another number of devices.
    """
    system, module = parse_system(hardware), read_optimized(program)
    across = dict(zip(mesh.layout, across_slices(mesh.layout, system.num_slices), strict=True))
    record = read_module(
        module,
        within_slice(system, mesh.layout),
        hardware=hardware,
        across=across if system.num_slices > 1 else None,
    )
    fits = program.memory_bytes["peak"] <= system.usable_bytes if system.chip.kind != "cpu" else None
    is_split = program.mesh_method == MeshMethod.SPLIT_PHYSICAL_AXES
    notes = (f"the mesh is laid out by {program.mesh_method}",) if is_split else ()
    return replace(
        record, mesh=mesh.layout, memory_bytes=dict(program.memory_bytes), fits=fits, notes=(*record.notes, *notes)
    )
