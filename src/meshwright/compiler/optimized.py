"""The optimized module of a compiled program, with op_names restored on data movement.

XLA's partitioner names the collectives it inserts after the value they move, not after the op that needs it. The phase
of such a collective could not be told.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from meshwright.compiler.program import CompiledProgram
from meshwright.hlo import Instruction, Module, parse_hlo
from meshwright.hlo.phases import consumer_of_move, is_partitioner_generated

_MOVES = ("all-gather", "all-to-all", "collective-permute")


def read_optimized(program: CompiledProgram) -> Module:
    """Parse a program's optimized module; inserted data movement gets the op_name and source of its consumer.

    The consumer is found in the partitioned module, where it is still next to the collective. A collective is matched
    between the two modules by opcode, channel and op_name.
    """
    module = parse_hlo(program.hlo)
    if not program.partitioned or not any(map(is_partitioner_generated, module.instructions())):
        return module
    left = parse_hlo(program.partitioned)
    moves = [one for one in left.instructions() if is_partitioner_generated(one) and one.opcode in _MOVES]
    wanted = {_channel(one): use for one in moves if (use := consumer_of_move(left, one)) is not None}
    computations = {
        name: replace(one, instructions={key: _named(found, wanted) for key, found in one.instructions.items()})
        for name, one in module.computations.items()
    }
    return replace(module, computations=computations)


def _named(instruction: Instruction, wanted: Mapping[tuple[str, ...], Instruction]) -> Instruction:
    use = wanted.get(_channel(instruction))
    return instruction if use is None else replace(instruction, op_name=use.op_name, source=use.source)


def _channel(instruction: Instruction) -> tuple[str, ...]:
    """What identifies a collective before and after optimization."""
    opcode = instruction.opcode.removesuffix("-start")
    return opcode, instruction.attributes.get("channel_id", ""), instruction.op_name
