"""Evaluate integers of a program on every device, if they are computed from the device's id and constants."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

import numpy as np

from meshwright.description.hlo.dataflow import VIEWS, forwarded_from
from meshwright.description.hlo.module import Instruction, Module

Memory = dict[tuple[str, str], np.ndarray | None]
"""By (computation, name) of an instruction: its value on every device; None if that is unknown."""

_DEEPEST = 150
"""Maximum number of instructions to trace a value back; each takes three of Python's 1000 stack frames."""

_WHOLE_NUMBERS = "sup"  # s32, u32, pred and the like
_INTEGER = re.compile(r"-?\d{1,18}")
_LARGEST_CONSTANT = 1 << 16

_UNARY: Mapping[str, Callable[[np.ndarray], np.ndarray]] = {"negate": np.negative, "abs": np.abs}
_BINARY: Mapping[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
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
}
_TERNARY: Mapping[str, Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]] = {
    "clamp": lambda low, a, high: np.clip(a, low, high),
    "select": lambda where, a, b: np.where(where != 0, a, b),
}
_ARITHMETIC = (_UNARY, _BINARY, _TERNARY)
_COMPARISONS: Mapping[str, Callable[..., np.ndarray]] = {
    "LT": np.less, "LE": np.less_equal, "GT": np.greater, "GE": np.greater_equal, "EQ": np.equal, "NE": np.not_equal,
}  # fmt: skip


def evaluate(module: Module, instruction: Instruction, num_devices: int) -> np.ndarray | None:
    """Return the value of an integer instruction on every device, [num_devices, *dims].

    None if it depends on anything but the device's id and constants. Device r * num_partitions + p is partition p of
    replica r.
    """
    return _known(module, instruction, num_devices, {}, 0)


def _known(module: Module, instruction: Instruction, n: int, memory: Memory, depth: int) -> np.ndarray | None:
    """Return the value of an integer instruction on each of `n` devices, [n, *dims]; None if it is unknown.

    memory: values that are known already; the new value is added.
    depth: the number of instructions traced back so far; beyond `_DEEPEST`, the value counts as unknown.
    """
    key = (instruction.computation, instruction.name)
    if key not in memory:
        memory[key] = None if depth > _DEEPEST else _value(module, instruction, n, memory, depth + 1)
    return memory[key]


def _value(module: Module, instruction: Instruction, n: int, memory: Memory, depth: int) -> np.ndarray | None:
    """Compute the value that `_known` returns, from the values of the operands."""
    opcode = instruction.opcode
    if instruction.shape.dtype[0] not in _WHOLE_NUMBERS and opcode != "copy-start":  # Its result is a tuple.
        return None
    if opcode == "constant":
        digits = instruction.text.replace("true", "1").replace("false", "0")
        values = _INTEGER.findall(digits)
        size = instruction.shape.size
        if len(values) != size or size > _LARGEST_CONSTANT:
            return None
        return np.broadcast_to(
            np.array([int(v) for v in values]).reshape(instruction.shape.dims), (n, *instruction.shape.dims)
        )
    if opcode in ("partition-id", "replica-id"):
        partitions = int(module.attributes.get("num_partitions", "1"))
        return np.arange(n) % partitions if opcode == "partition-id" else np.arange(n) // partitions
    if instruction.custom_call_target == "SliceId":
        # With several slices, evaluate for the devices of the first slice; the others run the same program.
        return np.zeros(n, dtype=np.int64)
    before = forwarded_from(module, instruction, VIEWS - {"transpose"} | {"convert"})
    if before is not None:
        value = _known(module, before, n, memory, depth)
        if value is None or instruction.shape.dtype == "tuple":
            return value
        return value.reshape(n, *instruction.shape.dims) if value.size == n * instruction.shape.size else None
    if not any(opcode in table for table in _ARITHMETIC) and opcode not in ("compare", "broadcast", "dynamic-slice"):
        return None
    operands = [_known(module, operand, n, memory, depth) for operand in module.operands(instruction)]
    known = [operand for operand in operands if operand is not None]
    return _computed(instruction, known, n) if len(known) == len(operands) else None


def _computed(instruction: Instruction, operands: list[np.ndarray], n: int) -> np.ndarray | None:
    """Return the value, [n, *dims], of arithmetic, a comparison, a dynamic-slice or the broadcast of a scalar.

    Args:
        instruction: the instruction.
        operands: the values of its operands, each [n, *dims].
        n: the number of devices.
    """
    if instruction.opcode == "compare":
        return _COMPARISONS[instruction.attributes["direction"]](operands[0], operands[1]).astype(np.int64)
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
    return _ARITHMETIC[len(operands) - 1][instruction.opcode](*operands)


def _quotient(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return a / b rounded towards zero, as in HLO. A divisor of zero counts as one, to avoid a warning."""
    b = np.where(b == 0, 1, b)
    return np.sign(a) * np.sign(b) * (np.abs(a) // np.abs(b))


def slice_sizes(instruction: Instruction) -> tuple[int, ...]:
    """Return the sizes of a dynamic-slice's result."""
    return tuple(int(size) for size in _INTEGER.findall(instruction.attributes["dynamic_slice_sizes"]))
