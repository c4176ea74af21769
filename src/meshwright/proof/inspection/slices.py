"""Find values of which each device uses only its own slice, and dims along which a gather joins shards."""

from __future__ import annotations

from meshwright.description.hlo.dataflow import VIEWS, origin, uses
from meshwright.description.hlo.module import Instruction
from meshwright.proof.inspection.context import ProgramContext

ELEMENTWISE = frozenset(
    {"add", "subtract", "multiply", "divide", "negate", "sqrt", "rsqrt", "power", "maximum", "minimum"}
    | {"convert", "select", "abs", "exponential", "log", "tanh", "logistic", "broadcast", "compare", "clamp", "erf"}
)
"""Ops that may be between a value and its slicing."""


def cut_axes(context: ProgramContext, value: Instruction) -> tuple[str, ...]:
    """Return the axes along which each device uses only its own slice of a value."""
    axes: set[str] = set()
    for user, held in uses(context.module, value, VIEWS | ELEMENTWISE):
        if user.opcode != "dynamic-slice" or user.operands[0] != held.name:
            return ()
        offsets = [context.variance.axes(offset) for offset in context.module.operands(user)[1:]]
        if not any(offsets):
            return ()
        axes |= frozenset().union(*offsets)
    return tuple(axis for axis in context.mesh if axis in axes)


def sliced_value(context: ProgramContext, value: Instruction) -> Instruction | None:
    """If `value` is computed elementwise from a slice at the device's index, return the sliced value; else None."""
    found = origin(context.module, value, frozenset(VIEWS | ELEMENTWISE))
    if found.opcode != "dynamic-slice" or not any(
        context.variance.axes(offset) for offset in context.module.operands(found)[1:]
    ):
        return None
    return origin(context.module, context.module.operand(found), frozenset(VIEWS | ELEMENTWISE))


def gathered_dims(context: ProgramContext, gather: Instruction) -> set[int]:
    """Return the dims along which an all-gather of one array joins shards."""
    parts, (whole, *_) = context.module.operand(gather).shape, gather.shape.arrays()
    return {dim for dim, (part, size) in enumerate(zip(parts.dims, whole.dims, strict=False)) if part != size}
