"""Reductions over an axis along which all devices already hold the same value."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from meshwright.hlo import Description, Instruction, Shape, describe
from meshwright.inspection.checks.duplicate_gathers import LEAST_BYTES
from meshwright.inspection.context import ProgramContext
from meshwright.inspection.finding import Finding, FindingKind
from meshwright.record import Collective, Kind, Phase


@dataclass(frozen=True, kw_only=True)
class ReducedTwice(Finding):
    """A reduction of equal values. equal_axes: axes along which all `degree` devices hold the same.

    is_sum: the result is `degree` times the value; otherwise the reduction has no effect.
    """

    kind = FindingKind.REDUCED_TWICE
    merged_by = ("equal_axes",)

    collective: Kind
    shape: Shape
    axes: tuple[str, ...]
    phase: Phase
    equal_axes: tuple[str, ...]
    degree: int
    is_sum: bool


def duplicate_reductions(context: ProgramContext) -> Iterator[Finding]:
    """Reductions over an axis along which all devices hold the same value; combined ones array by array."""
    for instruction, (first, *_) in context.communicating_instructions:
        if first.kind not in ("all-reduce", "reduce-scatter"):
            continue
        operands = context.module.operands(instruction)
        said = describe(context.module, instruction, number=len(operands))
        for operand, description in zip(operands, said, strict=True):
            axes = tuple(axis for axis in first.axes if axis not in context.variance.axes(operand))
            if axes and operand.shape.bytes >= LEAST_BYTES:
                yield _finding(context, instruction, first, operand, axes, description)


def _finding(
    context: ProgramContext,
    instruction: Instruction,
    first: Collective,
    operand: Instruction,
    axes: tuple[str, ...],
    description: Description,
) -> Finding:
    times = context.execution_counts.times[instruction.computation]
    return ReducedTwice(
        collective=first.kind,
        shape=operand.shape,
        axes=first.axes,
        phase=description.phase,
        equal_axes=axes,
        degree=context.degree(axes),
        is_sum=context.module.root(instruction.called("to_apply")[0]).opcode == "add",
        bytes=times * operand.shape.bytes,
        seconds=context.collective_seconds(first.kind, operand.shape.bytes, first.axes, count=times),
        source=description.place,
    )
