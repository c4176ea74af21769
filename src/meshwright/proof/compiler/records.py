"""Read a compiled program: its optimized module, with op_names restored on data movement, and its record.

XLA's partitioner names the collectives it inserts after the value they move, not after the op that needs it, so that
their phase could not be read from the name.
"""

from __future__ import annotations

from dataclasses import replace

from meshwright.description.hardware.slices import across_slices, within_slice
from meshwright.description.hardware.system import parse_system
from meshwright.description.hlo.module import Instruction, Module
from meshwright.description.hlo.parser import parse_hlo
from meshwright.description.hlo.phases import consumer_of_move, is_partitioner_generated
from meshwright.description.hlo.records import read_module
from meshwright.mesh import MeshShape
from meshwright.proof.compiler.program import CompiledProgram, MeshMethod
from meshwright.record import Record

_MOVES = ("all-gather", "all-to-all", "collective-permute")


def read_program(program: CompiledProgram, mesh: MeshShape, hardware: str) -> Record:
    """The record of a program compiled for a mesh on some hardware: flops, memory and collectives, per device.

    `fits` is None on simulated CPU devices, whose memory is the host's. A collective over axes within and between
    slices is compiled as two collectives, one of each. Raises where the program is for another number of devices.
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


def read_optimized(program: CompiledProgram) -> Module:
    """Parse a program's optimized module; inserted data movement gets the op_name and source of its consumer.

    The consumer is found in the partitioned module, where it is still next to the collective. A collective is matched
    between the two modules by opcode, channel and op_name.
    """
    module = parse_hlo(program.hlo)
    if not program.partitioned or not any(map(is_partitioner_generated, module.instructions())):
        return module
    partitioned = parse_hlo(program.partitioned)
    moves = [one for one in partitioned.instructions() if is_partitioner_generated(one) and one.opcode in _MOVES]
    consumers = {_identity(one): use for one in moves if (use := consumer_of_move(partitioned, one)) is not None}

    def named_after_consumer(instruction: Instruction) -> Instruction:
        use = consumers.get(_identity(instruction))
        return instruction if use is None else replace(instruction, op_name=use.op_name, source=use.source)

    computations = {
        name: replace(one, instructions={key: named_after_consumer(i) for key, i in one.instructions.items()})
        for name, one in module.computations.items()
    }
    return replace(module, computations=computations)


def _identity(instruction: Instruction) -> tuple[str, ...]:
    """Return what identifies a collective before and after optimization: opcode, channel, op_name."""
    opcode = instruction.opcode.removesuffix("-start")
    return opcode, instruction.attributes.get("channel_id", ""), instruction.op_name
