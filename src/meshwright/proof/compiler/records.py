"""Read a compiled program: its record, and its optimized module with op_names restored on data movement.

XLA's partitioner names the collectives it inserts after the value they move, not after the op that needs it, so that
their phase could not be read from the name.
"""

from __future__ import annotations

from dataclasses import replace

from meshwright.description.hardware.slices import across_slices, within_slice
from meshwright.description.hardware.system import parse_system
from meshwright.description.hlo.collectives import groups_of
from meshwright.description.hlo.module import Instruction, Module
from meshwright.description.hlo.parser import parse_hlo
from meshwright.description.hlo.phases import consumer_of_move, is_partitioner_generated
from meshwright.description.hlo.records import read_module
from meshwright.description.hlo.shapes import Shape
from meshwright.mesh import MeshShape
from meshwright.proof.compiler.program import CompiledProgram, MeshMethod
from meshwright.record import Record

_MOVES = ("all-gather", "all-to-all", "collective-permute")


def read_program(program: CompiledProgram, mesh: MeshShape, hardware: str) -> Record:
    """Return the record of a program compiled for a mesh on some hardware: flops, memory and collectives per device.

    `fits` is None on simulated CPU devices, whose memory is the host's. A collective over axes within and between
    slices is compiled as one within and one between slices. Raises if program and mesh differ in their number
    of devices.
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
        record,
        mesh=mesh.layout,
        memory_bytes=dict(program.memory_bytes),
        fits=fits,
        notes=(*record.notes, *notes, *program.notes),
    )


def read_optimized(program: CompiledProgram) -> Module:
    """Parse a program's optimized module; inserted data movement gets the op_name and source of its consumer.

    The consumer is found in the partitioned module, where it is still next to the collective. A collective is matched
    between the two modules by opcode, channel and op_name. If the compiler combined several collectives, the result has
    the channel of the first; it gets the op_names of all their consumers, joined by `;` as XLA does it.
    """
    module = parse_hlo(program.hlo)
    if not program.partitioned or not any(map(is_partitioner_generated, module.instructions())):
        return module
    partitioned = parse_hlo(program.partitioned)
    moves = [one for one in partitioned.instructions() if is_partitioner_generated(one) and one.opcode in _MOVES]
    uses = {_identity(one): (one, use) for one in moves if (use := consumer_of_move(partitioned, one)) is not None}
    num_devices, kept = module.num_devices, {_identity(one) for one in module.instructions()}
    combined = [one for one in uses if one not in kept]

    def named_after_consumer(instruction: Instruction) -> Instruction:
        move, use = uses.get(_identity(instruction), (None, None))
        if move is None or use is None:
            return instruction
        op_names = [use.op_name]
        for array in _gathered_arrays(instruction)[1:]:
            other = next((one for one in combined if _is_gathered_with(move, uses[one][0], array, num_devices)), None)
            if other is None:
                break
            combined.remove(other)
            op_names.append(uses[other][1].op_name)
        return replace(instruction, op_name=";".join(op_names), source=use.source)

    computations = {
        name: replace(one, instructions={key: named_after_consumer(i) for key, i in one.instructions.items()})
        for name, one in module.computations.items()
    }
    return replace(module, computations=computations)


def _gathered_arrays(instruction: Instruction) -> tuple[Shape, ...]:
    """Return the result arrays of an all-gather, one for each all-gather combined in it; () for other instructions."""
    if instruction.opcode not in ("all-gather", "all-gather-start"):
        return ()
    # A start has its operands before the results.
    return tuple((instruction.shape.elements[1] if instruction.opcode != "all-gather" else instruction.shape).arrays())


def _is_gathered_with(move: Instruction, other: Instruction, array: Shape, num_devices: int) -> bool:
    """Whether the compiler may have combined two all-gathers, `move` and `other`, into one that has the result `array`.

    They must have the same device groups, and `other` the shape of `array`. num_devices: devices of the program.
    """
    if (other.opcode, other.computation) != ("all-gather", move.computation):
        return False
    mesh, same_shape = {"devices": num_devices}, (other.shape.dtype, other.shape.dims) == (array.dtype, array.dims)
    return same_shape and sorted(groups_of(move, mesh)) == sorted(groups_of(other, mesh))


def _identity(instruction: Instruction) -> tuple[str, ...]:
    """Return (opcode, channel, op_name), which are the same for a collective before and after optimization."""
    opcode = instruction.opcode.removesuffix("-start")
    return opcode, instruction.attributes.get("channel_id", ""), instruction.op_name
