"""Stacked layers that are all gathered before the loop, which uses one layer at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from meshwright.description.hlo.dataflow import VIEWS_AND_CASTS, uses
from meshwright.description.hlo.module import Instruction
from meshwright.description.hlo.shapes import Shape
from meshwright.proof.inspection.checks.duplicate_gathers import LEAST_BYTES, GatheredTwice
from meshwright.proof.inspection.checks.moved_values import MovedState
from meshwright.proof.inspection.context import ProgramContext
from meshwright.proof.inspection.finding import Finding, FindingKind, joined
from meshwright.units import show_bytes


@dataclass(frozen=True, kw_only=True)
class HoistedGather(Finding):
    """The stacked weights of all layers, all-gathered before a loop that uses one layer per iteration.

    name, shape: those of the argument. is_along_stack: whether `axes` split the dim of layers.
    """

    kind = FindingKind.HOISTED_GATHER
    merged_by = ("axes", "is_along_stack")
    is_merged_across_sources = True

    name: str
    shape: Shape
    axes: tuple[str, ...]
    layers: int
    is_along_stack: bool

    def explains(self, other: Finding) -> bool:
        """Whether this gather causes `other`: a `GatheredTwice` or `MovedState` finding about the same weights."""
        if isinstance(other, GatheredTwice):
            return other.axes == self.axes and other.source == self.source
        return isinstance(other, MovedState) and other.name == self.name

    def _sentences(self) -> tuple[str, str]:
        over = joined(self.axes)
        return (
            f"{self.name} {self.shape} is gathered over {over} before the loop that uses one of its {self.layers}"
            f" layers at a time: all layers are whole on every device at once, {show_bytes(self.bytes)} more than one",
            f"split another dim over {over} than the one of layers, P(None, {over!r}, …): then each layer is gathered"
            " when the loop comes to it"
            if self.is_along_stack
            else "gather one layer inside of the scan: move the constraint (or the all_gather) from the stack into the"
            " function that the scan runs",
        )


def hoisted_gathers(context: ProgramContext) -> Iterator[Finding]:
    """Yield all-gathers of stacked arguments whose result a loop slices along its first dim."""
    names = {one.instruction.name: one.name for one in context.arguments}
    for move in context.collectives:
        one, source = move.collective, context.source_of(move)
        if one.kind != "all-gather" or one.bytes < LEAST_BYTES or source.opcode != "parameter":
            continue
        if len(move.instruction.operands) != 1:
            continue
        shape, stored = next(iter(move.instruction.shape.arrays())), source.shape.dims
        if len(stored) != len(shape.dims) or len(stored) < 2:
            continue
        layers, *_ = shape.dims
        is_inside = context.execution_counts.times[move.instruction.computation] > 1
        is_cut = _is_cut_in_layers if is_inside else _is_before_loop
        if layers == 1 or not is_cut(context, move.instruction, layers):
            continue
        size = source.shape.bytes * context.degree(one.axes)
        yield HoistedGather(
            name=names.get(source.name, source.op_name or source.name),
            shape=shape,
            axes=one.axes,
            layers=layers,
            is_along_stack=stored[0] != layers,
            bytes=size - size // layers,
            cost_seconds=context.no_seconds,
            source=one.source,
        )


def _is_before_loop(context: ProgramContext, gather: Instruction, layers: int) -> bool:
    """Whether a gathered stack is used only by loops that take one slice per iteration."""
    module, found = context.module, False
    for user, held in uses(module, gather, VIEWS_AND_CASTS):
        loops = [one for one in module.users(user) if one.opcode == "while"] if user.opcode == "tuple" else []
        places = [place for place, name in enumerate(user.operands) if name == held.name]
        if not loops or not all(_is_layered(context, loops[0], place, layers) for place in places):
            return False
        found = True
    return found


def _is_cut_in_layers(context: ProgramContext, gather: Instruction, layers: int) -> bool:
    """Whether a gathered stack is used only by slices of one layer, in the gather's own computation (a loop's body)."""
    used = list(uses(context.module, gather, VIEWS_AND_CASTS))
    return bool(used) and all(_is_layer(user, held, layers) for user, held in used)


def _is_layered(context: ProgramContext, loop: Instruction, place: int, layers: int) -> bool:
    """Whether a loop's body uses element `place` of its state, a stack of layers, only by slices of one layer."""
    module = context.module
    parameter = module.computations[loop.called("body")[0]].parameters[0]
    taken = [one for one in module.users(parameter) if one.opcode == "get-tuple-element" and one.index == place]
    used = [pair for one in taken for pair in uses(module, one, VIEWS_AND_CASTS)]
    slices = [user for user, held in used if _is_layer(user, held, layers)]
    carried = [user for user, _ in used if user.opcode == "tuple"]
    return bool(slices) and len(slices) + len(carried) == len(used)


def _is_layer(user: Instruction, held: Instruction, layers: int) -> bool:
    """Whether an op takes the slice of one layer of the stack `held`."""
    is_slice = user.opcode == "dynamic-slice" and user.operands[0] == held.name
    return is_slice and user.shape.size * layers == held.shape.size
