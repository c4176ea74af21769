"""Matmuls whose contracting dim is split, although their results are much larger than what goes in."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from meshwright.description.hlo.dataflow import VIEWS_AND_CASTS, origin, uses
from meshwright.description.hlo.groups import numbers
from meshwright.description.hlo.phases import phase_of
from meshwright.description.hlo.shapes import Shape
from meshwright.proof.inspection.checks.redundant_compute import RedundantCompute
from meshwright.proof.inspection.context import Argument, CompiledCollective, ProgramContext
from meshwright.proof.inspection.finding import Finding, FindingKind, joined
from meshwright.proof.inspection.slices import gathered_dims, sliced_value
from meshwright.units import show_bytes

_GROWTH = 4
"""The smallest ratio of a matmul's result to its replicated operand, in elements, for a finding."""


@dataclass(frozen=True, kw_only=True)
class SplitContraction(Finding):
    """A weight split on its contracting dim, so that the matmul's result is all-reduced.

    name, shape: those of the weight, or '' and that of an operand if both are computed. array: the matmul's result.
    is_gathered: the weight is all-gathered instead.
    """

    kind = FindingKind.SPLIT_CONTRACTION
    merged_by = ("name", "axes")

    name: str
    shape: Shape
    array: str
    axes: tuple[str, ...]
    is_gathered: bool

    def explains(self, other: Finding) -> bool:
        """Whether `other` is redundant compute that the gather of the weight causes, along one of its axes."""
        return self.is_gathered and isinstance(other, RedundantCompute) and other.axis in self.axes

    def _sentences(self) -> tuple[str, str]:
        over = joined(self.axes)
        if not self.name:
            return (
                f"both operands of a product, as {self.shape}, are split over {over} along the dim that it sums over:"
                f" every device makes a partial {self.array}, which is much larger, and an all-reduce adds them up,"
                f" {show_bytes(self.bytes)} a device and step",
                f"split another dim over {over}, that both operands and the product have (heads, not the features of a"
                " head), in the weights that make them too",
            )
        fix = (
            f"split {self.name} over {over} along the dim that stays (the vocabulary of an output layer): the product"
            " is then split too, and nothing is summed"
        )
        if self.is_gathered:
            return (
                f"{self.name} {self.shape} is split over {over} along the dim that its product sums over, and the other"
                f" operand is whole: it is gathered, {show_bytes(self.bytes)} a device and step, and every device along"
                f" {over} makes the same {self.array}",
                fix,
            )
        return (
            f"{self.name} {self.shape} is split over {over} along the dim that its product sums over, and the other"
            f" operand is whole: every device makes a partial {self.array}, and an all-reduce adds them up,"
            f" {show_bytes(self.bytes)} a device and step",
            fix,
        )


def split_contractions(context: ProgramContext) -> Iterator[Finding]:
    """Yield matmuls that contract a split dim of a weight with a replicated operand."""
    arguments = {one.instruction.name: one for one in context.arguments}
    for move in context.collectives:
        if len(move.instruction.operands) != 1:
            continue
        if move.collective.kind == "all-reduce":
            yield from _summed(context, arguments, move)
        elif move.collective.kind == "all-gather":
            yield from _gathered(context, arguments, move)


def _summed(
    context: ProgramContext, arguments: Mapping[str, Argument], move: CompiledCollective
) -> Iterator[SplitContraction]:
    """Yield the matmul whose partial sums an all-reduce adds, if its other operand is replicated.

    That operand counts as replicated if it is sliced to fit the weight, or if the result is much larger than it.
    """
    one = move.collective
    product = origin(context.module, context.module.operand(move.instruction), VIEWS_AND_CASTS)
    # A psum by hand is in the forward phase also where it sums gradients, whose product x.T @ g is not.
    is_forward = one.phase == "forward" and phase_of(product.op_name) == "forward"
    if product.opcode != "dot" or not is_forward:
        return
    sides = (product.attributes.get(f"{side}_contracting_dims", "") for side in ("lhs", "rhs"))
    is_over_examples = all(numbers(dims.strip("{}")) == (0,) for dims in sides)  # as x.T @ y, of data and data
    operands = context.module.operands(product)
    sources = [origin(context.module, operand, VIEWS_AND_CASTS | {"all-gather"}).name for operand in operands]
    largest = max((operand.shape for operand in operands), key=lambda shape: shape.size)
    is_computed = not arguments.keys() & set(sources) and not context.batch_axes.intersection(one.axes)
    if is_computed and not is_over_examples and product.shape.size >= _GROWTH * largest.size * context.degree(one.axes):
        yield _finding("", largest, move, one.array, is_gathered=False)
        return
    for name, other in zip(sources, operands[::-1], strict=True):
        argument = arguments.get(name)
        if argument is None or argument.spec is None or not set(one.axes) <= set(argument.spec.axes):
            continue
        whole = sliced_value(context, other)
        is_cut = whole is not None and not whole.opcode.startswith("all-gather")
        is_large = not is_over_examples and product.shape.size >= _GROWTH * other.shape.size * context.degree(one.axes)
        if is_large or (is_cut and 2 * one.bytes > context.whole_shape(argument).bytes):
            yield _finding(argument.name, argument.instruction.shape, move, one.array, is_gathered=False)
            return


def _gathered(
    context: ProgramContext, arguments: Mapping[str, Argument], move: CompiledCollective
) -> Iterator[SplitContraction]:
    """Yield the matmul for which a weight is gathered along its contracting dim, if all devices compute it alike."""
    argument = arguments.get(context.source_of(move).name)
    for user, held in uses(context.module, move.instruction, frozenset({"convert", "copy", "bitcast"})):
        if argument is None or user.opcode != "dot" or held.shape.dims != move.instruction.shape.dims:
            continue
        side = "lhs" if user.operands[0] == held.name else "rhs"
        summed = numbers(user.attributes.get(f"{side}_contracting_dims", "").strip("{}"))
        is_alike = set(move.collective.axes) <= set(context.variance.copies(user))
        if is_alike and gathered_dims(context, move.instruction) <= set(summed):
            yield _finding(argument.name, argument.instruction.shape, move, str(user.shape), is_gathered=True)
            return


def _finding(name: str, shape: Shape, move: CompiledCollective, array: str, *, is_gathered: bool) -> SplitContraction:
    return SplitContraction(
        name=name,
        shape=shape,
        array=array,
        axes=move.collective.axes,
        is_gathered=is_gathered,
        bytes=move.collective.bytes,
        cost_seconds=move.collective.seconds,
        source=move.collective.source,
    )
