"""Sums over devices in every iteration of a loop, and gathers whose parts are only added up."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from meshwright.description.hlo.dataflow import VIEWS, origin, uses
from meshwright.description.hlo.groups import numbers
from meshwright.description.hlo.module import Instruction, Module
from meshwright.description.hlo.shapes import Shape
from meshwright.proof.inspection.checks.duplicate_gathers import LEAST_BYTES
from meshwright.proof.inspection.checks.unexpected_collectives import UnexpectedCollective
from meshwright.proof.inspection.context import ProgramContext
from meshwright.proof.inspection.finding import Finding, FindingKind, joined
from meshwright.proof.inspection.slices import gathered_dims
from meshwright.units import show_bytes

_LEAST_SUM = 1 << 12
"""In bytes. Smaller sums, of scales, biases and metrics, are not reported."""

_SCALED = frozenset(VIEWS | {"convert", "multiply", "divide", "negate"})


@dataclass(frozen=True, kw_only=True)
class SumInLoop(Finding):
    """A sum over devices in every iteration whose results are only accumulated: one sum after the loop would do."""

    kind = FindingKind.SUM_IN_LOOP
    merged_by = ("axes", "iterations")

    array: str
    axes: tuple[str, ...]
    iterations: int

    def _sentences(self) -> tuple[str, str]:
        over = joined(self.axes)
        return (
            f"{self.array} is summed over {over} in each of {self.iterations} iterations and then added to a total:"
            f" {show_bytes(self.bytes)} a device and step more than one sum of the total",
            f"add up what each device has, and sum the total over {over} once, after the loop: in shard_map"
            " jax.lax.psum behind the scan (with check_vma=True: jax.lax.pcast of the parameters to varying before it);"
            " under jit a shard_map around the loop",
        )


@dataclass(frozen=True, kw_only=True)
class GatheredToSum(Finding):
    """A gather whose parts are only summed or averaged: a reduction would do."""

    kind = FindingKind.GATHERED_TO_SUM
    merged_by = ("axes",)

    array: str
    axes: tuple[str, ...]
    degree: int

    def explains(self, other: Finding) -> bool:
        """Whether `other` is an `UnexpectedCollective` finding about the same gather."""
        return isinstance(other, UnexpectedCollective) and other.axes == self.axes and other.line == self.line

    def _sentences(self) -> tuple[str, str]:
        over = joined(self.axes)
        return (
            f"{self.array} is gathered over {over}, {self.degree} parts on every device, only to be added up or"
            f" averaged: {show_bytes(self.bytes)} a device and step, and as much memory",
            f"jax.lax.pmean(x, {over!r}) or jax.lax.psum(x, {over!r}): it moves two parts instead of {self.degree}",
        )


def loop_sums(context: ProgramContext) -> Iterator[Finding]:
    """Yield `SumInLoop` and `GatheredToSum` findings, for hand-written collectives and those of the partitioner."""
    known = {one.source for finding in (SumInLoop.id, GatheredToSum.id) for one in context.traced(finding)}
    for found in (*_partitioned_sums(context), *_partitioned_gathers(context)):
        if found.source.partition(" ")[0] not in known:
            yield found
    yield from _traced(context)


def _partitioned_sums(context: ProgramContext) -> Iterator[SumInLoop]:
    """Yield all-reduces inside of loops whose results are only added to a value that the loop carries."""
    module = context.module
    for move in context.collectives:
        one, instruction = move.collective, move.instruction
        iterations = _iterations(context, instruction)
        if one.kind != "all-reduce" or one.bytes < _LEAST_SUM * one.count or iterations < 2:
            continue
        if module.root(instruction.called("to_apply")[0]).opcode != "add":
            continue
        arrays = [one for one in module.users(instruction) if one.opcode == "get-tuple-element"]
        if all(_is_accumulated(context, each) for each in arrays or [instruction]):
            times = one.count - one.count // iterations
            size = one.bytes // one.count
            yield SumInLoop(
                array=one.array,
                axes=one.axes,
                iterations=iterations,
                bytes=times * size,
                cost_seconds=context.collective_seconds("all-reduce", size, one.axes, count=times),
                source=one.source,
            )


def _iterations(context: ProgramContext, instruction: Instruction) -> int:
    """Return the trip count of the loop around an instruction; 1 outside of loops."""
    callers = context.module.callers[instruction.computation]
    if len(callers) != 1 or callers[0].opcode != "while":
        return 1
    times = context.execution_counts.times
    return times[instruction.computation] // max(1, times[callers[0].computation])


def _is_accumulated(context: ProgramContext, value: Instruction) -> bool:
    """Whether a value's only use in a loop's body is to be added, scaled or not, to an accumulator of the loop.

    An accumulator is an element of the loop's state that the body uses for nothing else.
    """
    module, found = context.module, False
    for user, held in uses(module, value, _SCALED):
        if user.opcode != "add":
            return False
        others = [one for one in module.operands(user) if one.name != held.name]
        carried = [origin(module, one) for one in others]
        if not all(_is_only_added_to(module, one) for one in carried):
            return False
        leaves = list(uses(module, user))
        if not all(
            last.opcode == "tuple" and module.computations[last.computation].root == last.name for last, _ in leaves
        ):
            return False
        found = True
    return found


def _is_only_added_to(module: Module, carried: Instruction) -> bool:
    """Whether a value is an element of a loop's state that the body uses only once, as an accumulator."""
    if carried.opcode != "get-tuple-element" or module.operand(carried).opcode != "parameter":
        return False
    alike = [one for one in module.users(module.operand(carried)) if one.index == carried.index]
    return len(alike) == 1 and len(list(uses(module, carried))) == 1


def _partitioned_gathers(context: ProgramContext) -> Iterator[GatheredToSum]:
    """Yield the partitioner's all-gathers of computed values that are then summed along the gathered dim."""
    for move in context.collectives:
        one, gather = move.collective, move.instruction
        if one.kind != "all-gather" or one.bytes < LEAST_BYTES or context.source_of(move).opcode == "parameter":
            continue
        parts, dims = context.module.operand(gather).shape, gathered_dims(context, gather)
        if parts.dtype[:1] in "su":
            continue  # compressed: a sum of integers would not do
        used = list(uses(context.module, gather, _SCALED - {"transpose", "reshape"}))
        sums = [
            user
            for user, _ in used
            if user.opcode == "reduce" and dims <= set(numbers(user.attributes.get("dimensions", "").strip("{}")))
        ]
        if used and len(sums) == len(used) and all(user.shape.size > 1 for user in sums):
            yield GatheredToSum(
                array=str(parts),
                axes=one.axes,
                degree=context.degree(one.axes),
                bytes=one.bytes,
                cost_seconds=one.seconds,
                source=one.source,
            )


def _traced(context: ProgramContext) -> Iterator[Finding]:
    """Yield findings for the mistakes found in the jaxpr."""
    for one in context.traced(SumInLoop.id):
        shape, times = Shape(one.dtype, one.dims), one.count - one.count // one.figures["iterations"]
        if shape.bytes >= _LEAST_SUM:
            yield SumInLoop(
                array=str(shape),
                axes=one.axes,
                iterations=one.figures["iterations"],
                bytes=times * shape.bytes,
                cost_seconds=context.collective_seconds("all-reduce", shape.bytes, one.axes, count=times),
                source=one.source,
            )
    for one in context.traced(GatheredToSum.id):
        shape, degree = Shape(one.dtype, one.dims), context.degree(one.axes)
        if shape.bytes // degree >= LEAST_BYTES:
            seconds = context.collective_seconds("all-gather", shape.bytes, one.axes, count=one.count)
            reduced = context.collective_seconds("all-reduce", shape.bytes // degree, one.axes, count=one.count)
            yield GatheredToSum(
                array=str(shape),
                axes=one.axes,
                degree=degree,
                bytes=one.count * (shape.bytes - 2 * (shape.bytes // degree)),
                cost_seconds=None if seconds is None or reduced is None else max(0.0, seconds - reduced),
                source=one.source,
            )
