"""Where a value comes from, where it goes, and what an index is on each device that computes it from its number."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping

import numpy as np

from meshwright.compiled.hlo import Instruction, Module

VIEWS = frozenset({"bitcast", "copy", "reshape", "transpose", "copy-start", "copy-done", "opt-barrier"})
"""Instructions that hand on the same elements, in another layout, place or shape."""

_LONGEST_CHAIN = 400
_DEEPEST = 150
"""How far an index is traced back; longer chains are given up. Python's own stack ends at 1000, at three calls each."""


def origin(module: Module, instruction: Instruction, through: frozenset[str] = VIEWS) -> Instruction:
    """The instruction that made a value: back through views, out of and into fusions, out of tuples and loops."""
    for _ in range(_LONGEST_CHAIN):
        before = _one_back(module, instruction, through)
        if before is None:
            break
        instruction = before
    return instruction


def uses(
    module: Module, value: Instruction, through: frozenset[str] = VIEWS
) -> Iterator[tuple[Instruction, Instruction]]:
    """Each first use of a value that is no view, as (user, the view of the value that it takes).

    Followed into and out of fusions and through the `-done` of an asynchronous pair. A value that leaves its
    computation otherwise (a loop's next trip, the program's result) is used by the instruction that takes it away.
    """
    waiting, seen = [value], set()
    while waiting:
        held = waiting.pop()
        if (held.computation, held.name) in seen:
            continue
        seen.add((held.computation, held.name))
        for user in module.users(held):
            forward = _one_forward(module, held, user, through)
            waiting += forward
            if not forward:
                yield user, held
        if module.computations[held.computation].root == held.name:
            fusions = [caller for caller in module.callers[held.computation] if caller.opcode == "fusion"]
            waiting += fusions
            if not fusions:
                yield held, held


def element(module: Module, instruction: Instruction, index: int) -> Instruction | None:
    """The instruction that makes one element of a tuple; of a loop's, one that the loop hands on unchanged.

    None where that cannot be told.
    """
    for _ in range(_LONGEST_CHAIN):
        if instruction.opcode == "tuple":
            return module.operands(instruction)[index] if index < len(instruction.operands) else None
        if instruction.opcode == "opt-barrier":
            instruction = module.operand(instruction)
        elif instruction.opcode in ("fusion", "call"):
            instruction = module.root(instruction.called("calls", "to_apply")[0])
        elif instruction.opcode == "while" and _is_constant(module, instruction, index):
            instruction = module.operand(instruction)
        elif instruction.opcode == "parameter" and (caller := _only_caller(module, instruction)) is not None:
            hands_on = caller.opcode == "while" and _is_constant(module, caller, index)
            if not hands_on and caller.opcode not in ("fusion", "call"):
                return None
            instruction = module.operand(caller, instruction.index)
        else:
            return None
    return None


def evaluate(module: Module, instruction: Instruction, num_devices: int) -> np.ndarray | None:
    """An integer value on every device, [num_devices, *dims]; None where it is not fixed by the device's number.

    Device r * num_partitions + p is partition p of replica r.
    """
    return _evaluate(module, instruction, num_devices, {}, 0)


Memory = dict[tuple[str, str], np.ndarray | None]

_WHOLE_NUMBERS = "sup"  # s32, u32, pred and the like
_INTEGER = re.compile(r"-?\d{1,18}")
_LARGEST_CONSTANT = 1 << 16

_ARITHMETIC: Mapping[str, Callable[..., np.ndarray]] = {
    "add": np.add,
    "subtract": np.subtract,
    "multiply": np.multiply,
    "divide": lambda a, b: _quotient(a, b),
    "remainder": lambda a, b: a - _quotient(a, b) * b,
    "minimum": np.minimum,
    "maximum": np.maximum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "shift-left": lambda a, b: a << np.clip(b, 0, 31),
    "shift-right-logical": lambda a, b: a >> np.clip(b, 0, 31),
    "negate": np.negative,
    "abs": np.abs,
    "clamp": lambda low, a, high: np.clip(a, low, high),
    "select": lambda where, a, b: np.where(where != 0, a, b),
}
_COMPARISONS: Mapping[str, Callable[..., np.ndarray]] = {
    "LT": np.less, "LE": np.less_equal, "GT": np.greater, "GE": np.greater_equal, "EQ": np.equal, "NE": np.not_equal,
}  # fmt: skip


def _evaluate(module: Module, instruction: Instruction, n: int, memory: Memory, depth: int) -> np.ndarray | None:
    """`evaluate`, each instruction once."""
    key = (instruction.computation, instruction.name)
    if key not in memory:
        memory[key] = None if depth > _DEEPEST else _value(module, instruction, n, memory, depth + 1)
    return memory[key]


def _value(module: Module, instruction: Instruction, n: int, memory: Memory, depth: int) -> np.ndarray | None:
    """The value of one instruction from those of its operands."""
    opcode = instruction.opcode
    if instruction.shape.dtype[0] not in _WHOLE_NUMBERS:
        return None
    if opcode == "constant":
        return _constant(instruction, n)
    if opcode in ("partition-id", "replica-id"):
        partitions = int(module.attributes.get("num_partitions", "1"))
        return np.arange(n) % partitions if opcode == "partition-id" else np.arange(n) // partitions
    before = _one_back(module, instruction, VIEWS - {"transpose"} | {"convert"})
    if before is not None:
        value = _evaluate(module, before, n, memory, depth)
        return None if value is None else _reshaped(value, instruction, n)
    if opcode not in _ARITHMETIC and opcode not in ("compare", "broadcast", "dynamic-slice"):
        return None
    operands = [_evaluate(module, operand, n, memory, depth) for operand in module.operands(instruction)]
    known = [operand for operand in operands if operand is not None]
    return _computed(instruction, known, n) if len(known) == len(operands) else None


def _computed(instruction: Instruction, operands: list[np.ndarray], n: int) -> np.ndarray | None:
    """The value of arithmetic, a comparison, a broadcast scalar or a slice."""
    if instruction.opcode == "compare":
        return _COMPARISONS[instruction.attributes["direction"]](*operands).astype(np.int64)
    if instruction.opcode == "dynamic-slice":
        sizes = slice_sizes(instruction)
        starts = [np.clip(s, 0, d - z) for s, d, z in zip(operands[1:], operands[0].shape[1:], sizes, strict=True)]
        rows = [np.arange(n).reshape(-1, *[1] * len(sizes))]
        for axis, (start, size) in enumerate(zip(starts, sizes, strict=True)):
            along = np.arange(size).reshape([1] + [size if dim == axis else 1 for dim in range(len(sizes))])
            rows.append(start.reshape(-1, *[1] * len(sizes)) + along)
        return operands[0][tuple(rows)]
    if instruction.opcode == "broadcast":
        scalar = operands[0].shape == (n,) and instruction.shape.size <= _LARGEST_CONSTANT
        shape = (n, *instruction.shape.dims)
        return np.broadcast_to(operands[0].reshape(n, *[1] * (len(shape) - 1)), shape) if scalar else None
    return _ARITHMETIC[instruction.opcode](*operands)


def _quotient(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Whole division as HLO does it: towards zero; by zero, which no program means, by one."""
    b = np.where(b == 0, 1, b)
    return np.sign(a) * np.sign(b) * (np.abs(a) // np.abs(b))


def slice_sizes(instruction: Instruction) -> tuple[int, ...]:
    """The size of each dim that a dynamic-slice cuts out."""
    return tuple(int(size) for size in _INTEGER.findall(instruction.attributes["dynamic_slice_sizes"]))


def _constant(instruction: Instruction, n: int) -> np.ndarray | None:
    """An integer literal on every device; None of one that the compiler prints as `{...}`."""
    digits = instruction.text.replace("true", "1").replace("false", "0")
    values = _INTEGER.findall(digits)
    size = instruction.shape.size
    if len(values) != size or size > _LARGEST_CONSTANT:
        return None
    return np.broadcast_to(
        np.array([int(v) for v in values]).reshape(instruction.shape.dims), (n, *instruction.shape.dims)
    )


def _reshaped(value: np.ndarray, instruction: Instruction, n: int) -> np.ndarray | None:
    """A value in the shape its instruction has."""
    return value.reshape(n, *instruction.shape.dims) if value.size == n * instruction.shape.size else None


def _one_back(module: Module, instruction: Instruction, through: frozenset[str]) -> Instruction | None:
    """The instruction whose value this one hands on; None where it makes its own."""
    if instruction.opcode in through or instruction.opcode.endswith("-done"):
        return module.operand(instruction) if instruction.operands else None
    if instruction.opcode == "get-tuple-element":
        return element(module, module.operand(instruction), instruction.index)
    if instruction.opcode == "fusion" and instruction.shape.dtype != "tuple":
        return module.root(instruction.called("calls")[0])
    if instruction.opcode == "parameter":
        caller = _only_caller(module, instruction)
        if caller is not None and caller.opcode in ("fusion", "call") and instruction.index < len(caller.operands):
            return module.operand(caller, instruction.index)
    return None


def _one_forward(module: Module, held: Instruction, user: Instruction, through: frozenset[str]) -> list[Instruction]:
    """What a user hands a value on as: itself where it is a view, the parameters of a fusion; nothing where it ends."""
    if user.opcode in through or user.opcode.endswith("-done"):
        return [user]
    if user.opcode == "fusion":
        parameters = module.computations[user.called("calls")[0]].parameters
        return [parameters[i] for i, name in enumerate(user.operands) if name == held.name and i in parameters]
    if user.opcode == "tuple" and module.computations[user.computation].root == user.name:
        fusions = [caller for caller in module.callers[user.computation] if caller.opcode == "fusion"]
        places = {i for i, name in enumerate(user.operands) if name == held.name}
        taken = [take for fusion in fusions for take in module.users(fusion)]
        if all(take.opcode == "get-tuple-element" for take in taken):
            return [take for take in taken if take.index in places]
    return []


def _is_constant(module: Module, loop: Instruction, index: int) -> bool:
    """Whether a loop's body hands on an element of its tuple unchanged."""
    root = module.root(loop.called("body")[0])
    if root.opcode != "tuple" or index >= len(root.operands):
        return False
    result = module.operands(root)[index]
    while result.opcode == "copy":
        result = module.operand(result)
    return (
        result.opcode == "get-tuple-element" and result.index == index and module.operand(result).opcode == "parameter"
    )


def _only_caller(module: Module, parameter: Instruction) -> Instruction | None:
    """The one instruction that calls a parameter's computation; None where several do, or none."""
    callers = module.callers[parameter.computation]
    return callers[0] if len(callers) == 1 else None
