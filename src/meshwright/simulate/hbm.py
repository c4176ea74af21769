"""What an instruction reads from the device's main memory and writes to it, in bytes as they lie there."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable

from meshwright.hlo import Instruction, Module, Tally, contradictions_as_errors, count_executions
from meshwright.hlo.collectives import collective_kind
from meshwright.hlo.loops import sequential_computations
from meshwright.hlo.tally import PhaseScope, phase_and_scope

FREE = frozenset(
    {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "add-dependency", "domain"}
    | {"partition-id", "replica-id", "opt-barrier", "while", "call", "conditional"}
)
"""Instructions that move nothing themselves."""

_SLICES = frozenset({"dynamic-slice", "slice", "gather"})
_CONVERSIONS = frozenset({"bitcast", "convert", "copy", "reshape", "transpose"})
_TARGETS = frozenset({"AllocateBuffer", "ConcatBitcast", "PrepareAsyncCallStart", "PrepareAsyncCallDone", "Sharding"})
"""Custom calls that move nothing: they name, join or announce buffers."""

_ALIAS = re.compile(r"\{(\d*)[\d, ]*\}: \((\d+), \{")


def hbm_bytes(module: Module, instruction: Instruction) -> int:
    """The bytes that one run of an instruction reads from main memory and writes to it.

    Its operands, each once, and its results, padded to the tiles they lie in; those in other memories (VMEM, the
    host's) and those that result and operand share are left out. Of what it only slices the slice counts, and of what
    it updates in place the update. What a fusion makes on the way to its results never leaves the chip. What is
    started or awaited here counts nothing: other engines move it.
    """
    if is_free(instruction):
        return 0
    if instruction.opcode == "fusion":
        return _fusion_bytes(module, instruction)
    operands, result = module.operands(instruction), instruction.shape.hbm_bytes
    if instruction.opcode in _SLICES:
        return 2 * result + _sum(operands[1:])
    if instruction.opcode == "dynamic-update-slice":
        return 2 * operands[1].shape.hbm_bytes
    if instruction.opcode == "scatter":
        return _sum(operands[1:]) + operands[-1].shape.hbm_bytes
    return result + _sum({operand.name: operand for operand in operands}.values())


def count_hbm_bytes(module: Module) -> Tally:
    """The bytes that a step reads from main memory and writes to it, loop bodies as often as they run.

    By `hbm_bytes`, of all ops; what collectives and asynchronous copies move is not in it. Every op is taken to find
    its operands in main memory, whatever a cache holds of them.
    """
    runs = count_executions(module)
    by_part: Counter[PhaseScope] = Counter()
    with contradictions_as_errors(module):
        for name in sequential_computations(module):
            for instruction in module.computations[name].instructions.values():
                moved = hbm_bytes(module, instruction) * runs.times[name]
                if moved and collective_kind(instruction) is None:
                    by_part[phase_and_scope(module, instruction)] += moved
    return Tally(by_phase_scope=dict(by_part), notes=runs.notes)


def is_free(instruction: Instruction) -> bool:
    """Whether an instruction does nothing itself: it names a value, calls others, starts or awaits other engines."""
    if instruction.opcode == "custom-call":
        return instruction.attributes.get("custom_call_target", "").strip('"') in _TARGETS
    return instruction.opcode in FREE or instruction.opcode.endswith(("-start", "-done", "-update"))


def shared_outputs(instruction: Instruction) -> dict[int, int]:
    """The number of the operand that each part of a result shares its memory with, as the compiler wrote it down.

    By the part's number in the tuple of results; 0 where the result is no tuple.
    """
    found = _ALIAS.findall(instruction.attributes.get("output_to_operand_aliasing", ""))
    return {int(output or 0): int(operand) for output, operand in found}


def _fusion_bytes(module: Module, fusion: Instruction) -> int:
    """What a fusion reads of each operand, and what it writes of each result."""
    body, shared = fusion.called("calls")[0], shared_outputs(fusion)
    root, results = module.root(body), list(fusion.shape.arrays())
    made = module.operands(root) if root.opcode == "tuple" else (root,)
    in_place, total = set(), 0
    for number, (result, value) in enumerate(zip(results, made, strict=False)):
        update = _update(module, value)
        if update is not None:
            in_place.add(_origin(module, module.operand(update)).name)
            result = module.operands(update)[1].shape
        total += result.hbm_bytes if number not in shared else 0
    parameters = module.computations[body].parameters
    for index, operand in enumerate(module.operands(fusion)):
        parameter = parameters.get(index)
        if parameter and parameter.name not in in_place and index not in shared.values() and operand.shape.hbm_bytes:
            total += _read(module, parameter)
    return total


def _read(module: Module, value: Instruction) -> int:
    """What a computation reads of a value: the slices where it takes no more than those."""
    total = 0
    for user in module.users(value):
        if user.opcode in _SLICES and user.operands[0] == value.name:
            total += user.shape.padded_bytes
        elif user.opcode == "bitcast":
            total += _read(module, user)
        elif user.opcode == "fusion":
            parameters = module.computations[user.called("calls")[0]].parameters
            total += sum(_read(module, parameters[i]) for i, name in enumerate(user.operands) if name == value.name)
        else:
            return value.shape.hbm_bytes
    return min(total, value.shape.hbm_bytes)


def _update(module: Module, value: Instruction) -> Instruction | None:
    """The dynamic-update-slice that makes a result of a fusion; None of one made otherwise."""
    made = _origin(module, value)
    return made if made.opcode == "dynamic-update-slice" else None


def _origin(module: Module, value: Instruction) -> Instruction:
    """What a value is a view or a conversion of."""
    while value.opcode in _CONVERSIONS:
        value = module.operand(value)
    return value


def _sum(instructions: Iterable[Instruction]) -> int:
    """The bytes of some instructions' results in main memory."""
    return sum(instruction.shape.hbm_bytes for instruction in instructions)
