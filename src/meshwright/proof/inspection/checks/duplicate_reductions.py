"""Reductions of values that are already equal along an axis, and collectives repeated by rematerialization."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from meshwright.description.hlo.dataflow import VIEWS_AND_CASTS, origin, uses
from meshwright.description.hlo.module import Instruction
from meshwright.description.hlo.phases import Description, describe, phase_of
from meshwright.description.hlo.shapes import Shape
from meshwright.proof.compiler.program import TracedMistake
from meshwright.proof.inspection.checks.duplicate_gathers import LEAST_BYTES
from meshwright.proof.inspection.context import ProgramContext
from meshwright.proof.inspection.finding import Finding, FindingKind, joined
from meshwright.record import Collective, Kind, Phase
from meshwright.units import show_bytes

_LEAST_USELESS = 1 << 14
"""In bytes. Smaller means of equal values are metrics and scales, averaged as a precaution, and are not reported."""

_LEAST_RECOMPUTED = 1 << 13
"""Arrays of fewer bytes are parts of a loss or a norm, and are not reported."""


@dataclass(frozen=True, kw_only=True)
class ReducedTwice(Finding):
    """A reduction over devices that hold the same value.

    equal_axes: axes along which all `degree` devices hold it. is_sum: the result is `degree` times the value; if False,
    the reduction has no effect. is_transposed: the reduction is the transpose of a sum in the forward pass.
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
    is_transposed: bool = False

    @property
    def is_wrong(self) -> bool:
        """Whether the result is wrong: True for a sum of equal values, False for a maximum."""
        return self.is_sum

    def explains(self, other: Finding) -> bool:
        """Whether `other` is the same sum in the backward pass, the transpose of this one."""
        if not isinstance(other, ReducedTwice) or self.is_transposed or not other.is_transposed:
            return False
        return other.equal_axes == self.equal_axes

    def _sentences(self) -> tuple[str, str]:
        over = joined(self.equal_axes)
        makes = f"makes {self.degree} times the value" if self.is_sum else "changes nothing"
        if self.is_transposed:
            return (
                f"the gradient of a sum over {joined(self.axes)} sums again, what all {self.degree} devices along"
                f" {over} hold alike: gradients are {self.degree} times what they should be (check_vma=False)",
                "differentiate the device's own loss and sum the gradients, or take the gradient outside of shard_map,"
                " or let JAX keep count: check_vma=True",
            )
        return (
            f"{self.collective} of {self.shape} over {joined(self.axes)} in {self.phase}, but all {self.degree}"
            f" devices along {over} hold the same: it {makes}",
            f"leave {over} out of this reduction: the value is reduced already; shard_map with check_vma=True tells"
            " which values still vary",
        )


def duplicate_reductions(context: ProgramContext) -> Iterator[Finding]:
    """Yield reductions over an axis along which all devices hold the same value, one finding per reduced array."""
    if context.is_traced:
        for one in context.traced(ReducedTwice.id):
            if one.figures["is_sum"] or Shape(one.dtype, one.dims).bytes >= _LEAST_USELESS:
                yield _traced(context, one)
        return
    for instruction, (first, *_) in context.communicating_instructions:
        if first.kind not in ("all-reduce", "reduce-scatter"):
            continue
        operands = context.module.operands(instruction)
        said = describe(context.module, instruction, number=len(operands))
        for operand, description in zip(operands, said, strict=True):
            axes = tuple(axis for axis in first.axes if axis not in context.variance.axes(operand))
            if not axes or origin(context.module, operand, VIEWS_AND_CASTS).opcode in ("constant", "iota"):
                continue  # counting by summing ones is intended
            is_sum = context.module.root(instruction.called("to_apply")[0]).opcode == "add"
            is_sum = is_sum and not _is_divided(context, instruction, context.degree(first.axes))
            # A value summed twice is wrong, however small it is; a reduction that changes nothing only costs.
            if is_sum or operand.shape.bytes >= LEAST_BYTES:
                yield _finding(context, instruction, first, operand, axes, description, is_sum=is_sum)


def _traced(context: ProgramContext, one: TracedMistake) -> ReducedTwice:
    """Convert a sum of equal values found in the jaxpr to a finding."""
    shape, equal, op = Shape(one.dtype, one.dims), tuple(one.figures["equal_axes"]), one.figures["op"]
    kind: Kind = "reduce-scatter" if "scatter" in op else "all-reduce"
    return ReducedTwice(
        collective=kind,
        shape=shape,
        axes=one.axes,
        phase=phase_of(one.figures["scope"]),
        equal_axes=equal,
        degree=context.degree(equal),
        is_sum=one.figures["is_sum"],
        is_transposed=one.figures["is_transposed"],
        bytes=one.count * shape.bytes,
        cost_seconds=context.collective_seconds(kind, shape.bytes, one.axes, count=one.count),
        source=one.source,
    )


def _is_divided(context: ProgramContext, instruction: Instruction, degree: int) -> bool:
    """Whether the result of a sum over `degree` devices is divided by `degree`, as for a mean."""
    for user, _ in uses(context.module, instruction, VIEWS_AND_CASTS):
        if user.opcode in ("multiply", "divide"):
            sides = [
                origin(context.module, side, VIEWS_AND_CASTS | {"broadcast"}) for side in context.module.operands(user)
            ]
            wanted = 1 / degree if user.opcode == "multiply" else degree
            texts = [side.text for side in sides if side.opcode == "constant"]
            if any(_number(text) == wanted for text in texts):
                return True
    return False


def _number(text: str) -> float | None:
    """Return the value of a scalar constant; None if the text is not a number."""
    try:
        return float(text)
    except ValueError:
        return None


def _finding(
    context: ProgramContext,
    instruction: Instruction,
    first: Collective,
    operand: Instruction,
    axes: tuple[str, ...],
    description: Description,
    *,
    is_sum: bool,
) -> ReducedTwice:
    times = context.execution_counts.times[instruction.computation]
    return ReducedTwice(
        collective=first.kind,
        shape=operand.shape,
        axes=first.axes,
        phase=description.phase,
        equal_axes=axes,
        degree=context.degree(axes),
        is_sum=is_sum,
        bytes=times * operand.shape.bytes,
        cost_seconds=context.collective_seconds(first.kind, operand.shape.bytes, first.axes, count=times),
        source=description.place,
    )


@dataclass(frozen=True, kw_only=True)
class RecomputedCollective(Finding):
    """An all-reduce or all-to-all of activations that rematerialization of the layer repeats."""

    kind = FindingKind.RECOMPUTED_COLLECTIVE
    merged_by = ("collective", "axes")
    is_merged_across_sources = True

    collective: Kind
    array: str
    axes: tuple[str, ...]

    def _sentences(self) -> tuple[str, str]:
        return (
            f"jax.checkpoint runs the {self.collective} of {self.array} over {joined(self.axes)} a second time in the"
            f" backward pass: {show_bytes(self.bytes)} a device and step",
            "keep what it returns: y = jax.ad_checkpoint.checkpoint_name(y, 'summed'), and jax.checkpoint(layer,"
            " policy=jax.checkpoint_policies.save_only_these_names('summed'))",
        )


def recomputed_collectives(context: ProgramContext) -> Iterator[Finding]:
    """Yield all-reduces and all-to-alls in rematerialized layers. Repeated weight gathers are intended."""
    for move in context.collectives:
        one = move.collective
        is_large = one.bytes >= _LEAST_RECOMPUTED * one.count
        if one.phase == "recompute" and one.kind in ("all-reduce", "all-to-all") and is_large:
            if context.is_expected(one.kind, one.axes, one.phase):
                continue
            yield RecomputedCollective(
                collective=one.kind,
                array=one.array,
                axes=one.axes,
                bytes=one.bytes,
                cost_seconds=one.seconds,
                source=one.source,
            )
