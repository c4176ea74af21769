"""Bytes that an instruction reads from and writes to the device's main memory (HBM)."""

from __future__ import annotations

from collections.abc import Iterable

from meshwright.description.hlo.kernel_cost import cost_of
from meshwright.description.hlo.module import Instruction, Module
from meshwright.proof.simulate.aliasing import parse_aliases

_FREE = frozenset(
    {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "add-dependency", "domain"}
    | {"partition-id", "replica-id", "opt-barrier", "while", "call", "conditional"}
)
"""Instructions that move no data themselves."""

_SLICES = frozenset({"dynamic-slice", "slice", "gather"})
_CONVERSIONS = frozenset({"bitcast", "convert", "copy", "reshape", "transpose"})
_TARGETS = frozenset({"AllocateBuffer", "ConcatBitcast", "PrepareAsyncCallStart", "PrepareAsyncCallDone", "Sharding"})
"""Custom calls that move no data: they name, join or announce buffers."""


def hbm_bytes(module: Module, instruction: Instruction) -> int:
    """Return the bytes that one execution of an instruction reads from and writes to main memory.

    Counts operands, each once, and results, with tile padding; not arrays in other memories (VMEM, host), nor results
    that share memory with an operand. A slice counts only the part it takes; an in-place update counts only the update;
    a kernel counts the bytes that its named scope states (`KernelCost`). Values inside a fusion stay on chip.
    Asynchronous starts and ends count nothing: other engines transfer the data.
    """
    if is_free(instruction):
        return 0
    if cost := cost_of(instruction):
        return cost.num_bytes
    if instruction.opcode == "fusion":
        return _fusion_bytes(module, instruction)
    operands, result = module.operands(instruction), instruction.shape.hbm_bytes
    if instruction.opcode in _SLICES:
        return 2 * result + _total_bytes(operands[1:])
    if instruction.opcode == "dynamic-update-slice":
        return 2 * operands[1].shape.hbm_bytes
    if instruction.opcode == "scatter":
        return _total_bytes(operands[1:]) + operands[-1].shape.hbm_bytes
    return result + _total_bytes({operand.name: operand for operand in operands}.values())


def is_free(instruction: Instruction) -> bool:
    """Whether an instruction moves no data itself: it names values, calls, or starts or awaits a transfer."""
    if instruction.opcode == "custom-call":
        return instruction.custom_call_target in _TARGETS
    return instruction.opcode in _FREE or instruction.opcode.endswith(("-start", "-done", "-update"))


def _fusion_bytes(module: Module, fusion: Instruction) -> int:
    """Return the bytes that a fusion reads from its operands and writes to its results."""
    body, annotated = fusion.called("calls")[0], fusion.attributes.get("output_to_operand_aliasing", "")
    # The compiler's annotation: which operand a result shares memory with.
    shared = {output[0] if output else 0: operand for output, operand, _ in parse_aliases(annotated)}
    root, results = module.root(body), list(fusion.shape.arrays())
    made = module.operands(root) if root.opcode == "tuple" else (root,)
    in_place, total = set(), 0
    for number, (result, value) in enumerate(zip(results, made, strict=False)):
        update = _origin(module, value)
        if update.opcode in ("dynamic-update-slice", "scatter"):
            in_place.add(_origin(module, module.operand(update)).name)
            result = module.operands(update)[1 if update.opcode == "dynamic-update-slice" else -1].shape
        total += result.hbm_bytes if number not in shared else 0
    parameters = module.computations[body].parameters
    for index, operand in enumerate(module.operands(fusion)):
        parameter = parameters.get(index)
        if parameter and parameter.name not in in_place and index not in shared.values() and operand.shape.hbm_bytes:
            total += _bytes_read(module, parameter)
    return total


def _bytes_read(module: Module, value: Instruction) -> int:
    """Return the bytes that a computation reads of a value: only its slices, if nothing else of it is read."""
    total = 0
    for user in module.users(value):
        if user.opcode in _SLICES and user.operands[0] == value.name:
            total += user.shape.padded_bytes
        elif user.opcode == "bitcast":
            total += _bytes_read(module, user)
        elif user.opcode == "fusion":
            parameters = module.computations[user.called("calls")[0]].parameters
            total += sum(
                _bytes_read(module, parameters[i]) for i, name in enumerate(user.operands) if name == value.name
            )
        else:
            return value.shape.hbm_bytes
    return min(total, value.shape.hbm_bytes)


def _origin(module: Module, value: Instruction) -> Instruction:
    """Return the value from which views and conversions compute `value`."""
    while value.opcode in _CONVERSIONS:
        value = module.operand(value)
    return value


def _total_bytes(instructions: Iterable[Instruction]) -> int:
    return sum(instruction.shape.hbm_bytes for instruction in instructions)
