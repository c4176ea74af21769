"""What is gathered or summed more than once, or summed whole where a share would do."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from meshwright.hlo import VIEWS, Description, Instruction, describe, origin, uses
from meshwright.inspection.finding import Finding
from meshwright.inspection.subject import Move, Subject
from meshwright.record import Collective, Phase
from meshwright.units import show_bytes

_SAME_TENSOR = frozenset(VIEWS | {"convert"})
_ELEMENTWISE = frozenset(
    {"add", "subtract", "multiply", "divide", "negate", "sqrt", "rsqrt", "power", "maximum", "minimum"}
    | {"convert", "select", "abs", "exponential", "log", "tanh", "reduce-window"}
)
"""What a sum can go through before it is cut; XLA:CPU takes the norm of large arrays by windows first."""

_CUT_LATER = (
    "constrain the sum (the gradient) to the sharding of what it is added to (the parameter), before anything is"
    " computed with it; take norms of the shards"
)
_CUT_AT_ONCE = (
    "the program takes its share at once, yet the compiler sums it whole: sum it with psum_scatter in shard_map, or"
    " store the parameter split along another dim"
)

_LEAST_BYTES = 1024
"""Sums of less than this are scalars and counts, which are not worth a word."""


def gathered_twice(subject: Subject) -> Iterator[Finding]:
    """Tensors that several all-gathers of one phase gather, or one that a loop repeats with nothing changed.

    But where that is meant, as of weights in shards that every microbatch gathers anew.
    """
    groups: dict[tuple[str, str, tuple[str, ...], Phase], list[Move]] = defaultdict(list)
    for move in subject.moves:
        one = move.collective
        for operand in subject.module.operands(move.instruction):
            if one.kind == "all-gather" and one.bytes >= _LEAST_BYTES:
                source = origin(subject.module, operand, _SAME_TENSOR)
                groups[source.computation, source.name, one.axes, one.phase].append(move)
    for (computation, name, axes, phase), moves in groups.items():
        if subject.is_planned("all-gather", axes, phase):
            continue
        source = subject.module.computations[computation].instructions[name]
        if sum(move.collective.count for move in moves) > max(1, subject.runs.times[computation]):
            yield _again(subject, source, moves)


def _again(subject: Subject, source: Instruction, moves: list[Move]) -> Finding:
    """What it costs to gather one value by some all-gathers."""
    first, runs = moves[0].collective, max(1, subject.runs.times[source.computation])
    times = sum(move.collective.count for move in moves)
    size = source.shape.bytes * subject.degree(first.axes)
    how = f"by {len(moves)} all-gathers" if len(moves) > 1 else f"in every one of {times // runs} trips"
    again = size * (times - runs)
    return Finding(
        kind="gathered twice",
        evidence=f"{source.op_name or source.name} {source.shape} is gathered over {'*'.join(first.axes)} {how} of"
        f" {first.phase}: {show_bytes(again)} a device and step more than once",
        bytes=again,
        seconds=subject.collective_seconds("all-gather", size, first.axes, count=times - runs),
        source=moves[-1].collective.source,
        fix="gather it once and hand the result on; before the loop where memory allows",
    )


def reduced_twice(subject: Subject) -> Iterator[Finding]:
    """Sums over an axis along which all devices already hold the same; of combined ones, array by array."""
    for instruction, (first, *_) in subject.communicating:
        if first.kind not in ("all-reduce", "reduce-scatter"):
            continue
        operands = subject.module.operands(instruction)
        said = describe(subject.module, instruction, number=len(operands))
        for operand, description in zip(operands, said, strict=True):
            axes = tuple(axis for axis in first.axes if axis not in subject.variance.axes(operand))
            if axes and operand.shape.bytes >= _LEAST_BYTES:
                yield _reduced(subject, instruction, first, operand, axes, description)


def _reduced(
    subject: Subject,
    instruction: Instruction,
    first: Collective,
    operand: Instruction,
    axes: tuple[str, ...],
    said: Description,
) -> Finding:
    """What it costs to reduce one array over axes along which it is the same."""
    over, degree = "*".join(axes), subject.degree(axes)
    times = subject.runs.times[instruction.computation]
    is_sum = subject.module.root(instruction.called("to_apply")[0]).opcode == "add"
    makes = f"makes {degree} times the value" if is_sum else "changes nothing"
    return Finding(
        kind="reduced twice",
        evidence=f"{first.kind} of {operand.shape} over {'*'.join(first.axes)} in {said.phase}, but all {degree}"
        f" devices along {over} hold the same: it {makes}",
        bytes=times * operand.shape.bytes,
        seconds=subject.collective_seconds(first.kind, operand.shape.bytes, first.axes, count=times),
        source=said.place,
        fix=f"leave {over} out of this reduction: the value is reduced already; shard_map with check_vma=True tells"
        " which values still vary",
    )


def all_reduce_for_scatter(subject: Subject) -> Iterator[Finding]:
    """Sums of whole arrays of which each device then keeps a share."""
    for move in subject.moves:
        one = move.collective
        if move.kind != "all-reduce" or one.bytes < _LEAST_BYTES:
            continue
        is_cut_at_once = one.kind == "reduce-scatter" and subject.has_reduce_scatter
        single = one.kind == "all-reduce" and len(move.instruction.operands) == 1
        if is_cut_at_once or (single and _is_cut_later(subject, move.instruction)):
            saved = one.bytes - one.bytes // subject.degree(one.axes)
            yield Finding(
                kind="all-reduce for reduce-scatter",
                evidence=f"all-reduce of {one.array} over {'*'.join(one.axes)} in {one.phase}, of which every device"
                f" then takes a share: {show_bytes(one.bytes)} are sent back to all for nothing",
                bytes=saved,
                seconds=one.seconds / 2 if one.seconds is not None else None,
                source=one.source,
                fix=_CUT_AT_ONCE if is_cut_at_once else _CUT_LATER,
            )


def _is_cut_later(subject: Subject, instruction: Instruction) -> bool:
    """Whether a sum is used only elementwise until the device's number cuts it, or to make single numbers of it."""
    cut = False
    for user, held in uses(subject.module, instruction, VIEWS | _ELEMENTWISE):
        if user.opcode == "dynamic-slice" and user.operands[0] == held.name:
            offsets = subject.module.operands(user)[1:]
            if not any(subject.variance.axes(offset) for offset in offsets):
                return False
            cut = True
        elif user.shape.dtype == "tuple" or user.shape.size > 1:
            return False
    return cut
