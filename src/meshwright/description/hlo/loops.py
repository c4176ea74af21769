"""How often each computation of a program runs in one step."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from meshwright.description.hlo.dataflow import element
from meshwright.description.hlo.evaluation import evaluate
from meshwright.description.hlo.module import Instruction, Module

_KNOWN = re.compile(r'"known_trip_count":\{"n":"(\d{1,18})"')
_FLIPPED = {"LT": "GT", "GT": "LT", "LE": "GE", "GE": "LE", "NE": "NE"}


@dataclass(frozen=True, kw_only=True)
class ExecutionCounts:
    """How often each computation runs in a step.

    times: executions by the computation's name; 0 for one applied per element (a reduction's addition). notes: messages
    about loops and conditionals whose count is not known.
    """

    times: Mapping[str, int]
    notes: tuple[str, ...]


def count_executions(module: Module) -> ExecutionCounts:
    """Return how often each computation runs in a step.

    A loop's body runs as often as its trip count; one iteration is assumed, with a note, if that is unknown. Every
    branch of a conditional counts as if it were taken.
    """
    times = dict.fromkeys(module.computations, 0)
    times[module.entry] = 1
    notes: list[str] = []
    # Callees are printed before their callers, so in reverse order each count is final before it is used.
    for computation in reversed(tuple(module.computations.values())):
        if not times[computation.name]:
            continue
        for instruction in computation.instructions.values():
            for callee, factor in _called_counts(module, instruction, notes):
                times[callee] += times[computation.name] * factor
    return ExecutionCounts(times=times, notes=tuple(dict.fromkeys(notes)))


def sequential_computations(module: Module) -> list[str]:
    """Return the computations that run instruction by instruction: the entry, loop bodies, branches and calls."""
    found, waiting = [], [module.entry]
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.append(name)
            waiting += [
                called for i in module.computations[name].instructions.values() for called in called_in_sequence(i)
            ]
    return found


def called_in_sequence(instruction: Instruction) -> tuple[str, ...]:
    """Return the computations that an instruction calls and that run instruction by instruction (a fusion's does not).

    Loop conditions are left out, because they create no arrays.
    """
    if instruction.opcode == "conditional":
        return instruction.branches
    key = {"while": "body", "call": "to_apply"}.get(instruction.opcode)
    return instruction.called(key) if key else ()


def trip_count(module: Module, loop: Instruction) -> int | None:
    """Return the trip count of a while loop, or its maximum if the loop may end sooner; None if it depends on data.

    CPU and GPU backends print it as `known_trip_count`. On TPU it is derived from a condition that compares a counter,
    which changes by a constant in each iteration, with a constant.
    """
    if found := _KNOWN.search(loop.attributes.get("backend_config", "")):
        return int(found[1])
    compared = _comparison(module, loop)
    if compared is None:
        return None
    index, direction, limit = compared
    first = element(module, module.operand(loop), index)
    start = None if first is None else _constant_value(module, first)
    step = _step(module, loop, index)
    if start is None or not step:
        return None
    # How many of start, start + step, ... satisfy the comparison, up to the first that does not.
    if direction == "NE":
        return (limit - start) // step if (limit - start) % step == 0 and (limit - start) // step >= 0 else None
    if (step > 0) != (direction in ("LT", "LE")):
        return None
    distance = (limit - start) * (1 if step > 0 else -1) + (direction in ("LE", "GE"))
    return max(0, -(-distance // abs(step)))


def _called_counts(module: Module, instruction: Instruction, notes: list[str]) -> list[tuple[str, int]]:
    """Return (computation, runs) for each computation that an instruction runs; append messages to `notes`."""
    opcode = instruction.opcode.removesuffix("-start")
    if opcode == "while":
        trips = trip_count(module, instruction)
        if trips is None:
            notes.append(f"loop {instruction.op_name or instruction.name}: its trips depend on data; counted as one")
        body, condition = instruction.called("body"), instruction.called("condition")
        known = 1 if trips is None else trips
        return [*((name, known) for name in body), *((name, known + 1) for name in condition)]
    if opcode == "conditional":
        branches = instruction.branches
        notes.append(f"conditional {instruction.op_name or instruction.name}: each of {len(branches)} branches counted")
        return [(name, 1) for name in branches]
    if opcode in ("fusion", "call", "async", "custom-call"):
        return [(name, 1) for name in instruction.called("calls", "to_apply", "called_computations")]
    return []


def _comparison(module: Module, loop: Instruction) -> tuple[int, str, int] | None:
    """Return the comparison in a loop's condition as (tuple index of the counter, direction, constant).

    If `and` joins several comparisons, the first with a constant is returned; it bounds the trip count. None if there
    is none.
    """
    root, arguments = module.root(loop.called("condition")[0]), None
    if root.opcode == "fusion":
        root, arguments = module.root(root.called("calls")[0]), module.operands(root)
    for compare in module.operands(root) if root.opcode == "and" else (root,):
        if compare.opcode == "compare" and (found := _compared_with_constant(module, compare, arguments)):
            return found
    return None


def _compared_with_constant(
    module: Module, compare: Instruction, arguments: tuple[Instruction, ...] | None
) -> tuple[int, str, int] | None:
    """Return what a compare instruction compares, as `_comparison` does; None if it has no constant.

    arguments: the operands of the fusion that contains it; None outside a fusion.
    """
    sides = [_resolve_fusion_parameter(side, arguments) for side in module.operands(compare)]
    direction = compare.attributes.get("direction", "")
    for side, other, way in ((sides[0], sides[1], direction), (sides[1], sides[0], _FLIPPED.get(direction, ""))):
        limit = _constant_value(module, other)
        if side.opcode == "get-tuple-element" and limit is not None and way in _FLIPPED:
            return side.index, way, limit
    return None


def _resolve_fusion_parameter(side: Instruction, arguments: tuple[Instruction, ...] | None) -> Instruction:
    """Return the fusion's operand if `side` is a parameter of the fusion's computation; else `side`.

    arguments: the fusion's operands; None outside a fusion.
    """
    inside = arguments is None or side.opcode != "parameter"
    return side if inside or arguments is None else arguments[side.index]


def _step(module: Module, loop: Instruction, index: int) -> int | None:
    """Return the constant that a loop adds to an element of its tuple in each iteration; None if there is none."""
    moved = element(module, module.root(loop.called("body")[0]), index)
    while moved is not None and moved.opcode in ("copy", "bitcast"):
        moved = module.operand(moved)
    if moved is None:
        return None
    arguments = None
    if moved.opcode == "fusion":
        arguments = module.operands(moved)
        moved = module.root(moved.called("calls")[0])
    if moved.opcode not in ("add", "subtract"):
        return None
    sides = [_resolve_fusion_parameter(side, arguments) for side in module.operands(moved)]
    numbers = [number for side in sides if (number := _constant_value(module, side)) is not None]
    counts = any(_is_element(module, side, index) for side in sides)
    if len(numbers) != 1 or not counts:
        return None
    return numbers[0] if moved.opcode == "add" else -numbers[0]


def _is_element(module: Module, instruction: Instruction, index: int) -> bool:
    """Whether an instruction is element `index` of the loop's tuple, or a copy of it."""
    while instruction.opcode in ("copy", "bitcast"):
        instruction = module.operand(instruction)
    return instruction.opcode == "get-tuple-element" and instruction.index == index


def _constant_value(module: Module, instruction: Instruction) -> int | None:
    """Return a scalar that is the same constant on every device; None for other values."""
    value = evaluate(module, instruction, max(2, module.num_devices))
    return int(value.flat[0]) if value is not None and value.ndim == 1 and (value == value[0]).all() else None
