"""The module of a compiled program, with the names that XLA's partitioner did not give to what it made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from meshwright.compiler.program import CompiledProgram
from meshwright.hlo import Instruction, Module, parse_hlo
from meshwright.hlo.phases import consumer_of_move, is_partitioner_generated

_MOVES = ("all-gather", "all-to-all", "collective-permute")


def read_optimized(program: CompiledProgram) -> Module:
    """The optimized module of a program, in which data is moved by the name of what it is moved for.

    The module that the partitioner left still has that right behind what moves the data; the optimized one often has
    not. A collective is the same in both where channel, kind and name are.
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
    """An instruction by the name and the source of what it is for, where that is known."""
    use = wanted.get(_channel(instruction))
    return instruction if use is None else replace(instruction, op_name=use.op_name, source=use.source)


def _channel(instruction: Instruction) -> tuple[str, ...]:
    """What tells a collective from all others, before it is optimized and after."""
    opcode = instruction.opcode.removesuffix("-start")
    return opcode, instruction.attributes.get("channel_id", ""), instruction.op_name
