"""Weights split along the dim that their product sums over, while the other operand is whole."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from meshwright.description.hlo.dataflow import VIEWS, origin
from meshwright.description.hlo.module import Instruction
from meshwright.description.hlo.shapes import Shape
from meshwright.proof.inspection.context import ProgramContext
from meshwright.proof.inspection.finding import Finding, FindingKind, joined
from meshwright.proof.inspection.slices import is_cut_of
from meshwright.units import show_bytes

_FORWARDS = frozenset(VIEWS | {"convert"})


@dataclass(frozen=True, kw_only=True)
class SplitContraction(Finding):
    """A weight split on its contraction, whose product is summed over devices. shape: of the weight on a device."""

    kind = FindingKind.SPLIT_CONTRACTION
    merged_by = ("name", "axes")

    name: str
    shape: Shape
    array: str
    axes: tuple[str, ...]

    def _sentences(self) -> tuple[str, str]:
        over = joined(self.axes)
        return (
            f"{self.name} {self.shape} is split over {over} along the dim that its product sums over, and the other"
            f" operand is whole: every device makes a partial {self.array}, and an all-reduce adds them up,"
            f" {show_bytes(self.bytes)} a device and step",
            f"split {self.name} over {over} along the dim that stays (the vocabulary of an output layer): the product"
            " is then split too, and nothing is summed",
        )


def split_contractions(context: ProgramContext) -> Iterator[Finding]:
    """Yield all-reduces of products that sum over a split dim of a weight, of which the other operand was cut."""
    names = {one.instruction.name: one for one in context.arguments}
    for move in context.collectives:
        one = move.collective
        if one.kind != "all-reduce" or len(move.instruction.operands) != 1:
            continue
        product = origin(context.module, context.module.operand(move.instruction), _FORWARDS)
        if product.opcode != "dot":
            continue
        for weight, other in (context.module.operands(product), context.module.operands(product)[::-1]):
            stored = origin(context.module, weight, _FORWARDS)
            argument = names.get(stored.name) if stored.opcode == "parameter" else None
            if argument is None or argument.spec is None or not set(one.axes) <= set(argument.spec.axes):
                continue
            whole = _whole_operand(context, other)
            if whole is not None and 2 * one.bytes > context.whole_shape(argument).bytes:
                yield SplitContraction(
                    name=argument.name,
                    shape=argument.instruction.shape,
                    array=one.array,
                    axes=one.axes,
                    bytes=one.bytes,
                    cost_seconds=one.seconds,
                    source=one.source,
                )
                break


def _whole_operand(context: ProgramContext, other: Instruction) -> Instruction | None:
    """Return the whole value that was cut for a product; None if it was split anyway, or gathered before."""
    whole = is_cut_of(context, other)
    return None if whole is None or whole.opcode.startswith("all-gather") else whole
