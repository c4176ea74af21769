"""Tensors that are gathered more than once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from meshwright.description.hlo.dataflow import VIEWS_AND_CASTS, origin
from meshwright.description.hlo.module import Instruction
from meshwright.description.hlo.phases import phase_of
from meshwright.description.hlo.shapes import Shape
from meshwright.proof.inspection.context import CompiledCollective, ProgramContext
from meshwright.proof.inspection.finding import Finding, FindingKind, joined
from meshwright.record import Phase
from meshwright.units import show_bytes

LEAST_BYTES = 1024
"""Smaller gathers carry scalars and counts and are not reported."""


@dataclass(frozen=True, kw_only=True)
class GatheredTwice(Finding):
    """A tensor gathered by several all-gathers of a phase, or in every iteration of a loop.

    tensor, shape: its name, and its shape before the gather. num_gathers: the number of all-gather instructions.
    """

    kind = FindingKind.GATHERED_TWICE

    tensor: str
    shape: Shape
    axes: tuple[str, ...]
    phase: Phase
    num_gathers: int
    iterations: int

    def _sentences(self) -> tuple[str, str]:
        how = (
            f"by {self.num_gathers} all-gathers" if self.num_gathers > 1 else f"in each of {self.iterations} iterations"
        )
        return (
            f"{self.tensor} {self.shape} is gathered over {joined(self.axes)} {how} of {self.phase}:"
            f" {show_bytes(self.bytes)} a device and step more than once",
            "gather it once and hand the result on; before the loop where memory allows",
        )


def duplicate_gathers(context: ProgramContext) -> Iterator[Finding]:
    """Yield tensors gathered by several all-gathers of one phase, or gathered unchanged in every loop iteration.

    Intended repetitions are not reported, e.g. the gathers of sharded weights for every microbatch.
    """
    groups: dict[tuple[str, str, tuple[str, ...], Phase], list[CompiledCollective]] = defaultdict(list)
    for move in context.collectives:
        one = move.collective
        for operand in context.module.operands(move.instruction):
            if one.kind == "all-gather" and one.bytes >= LEAST_BYTES:
                source = origin(context.module, operand, VIEWS_AND_CASTS)
                groups[source.computation, source.name, one.axes, one.phase].append(move)
    found = []
    for (computation, name, axes, phase), gathers in groups.items():
        if context.is_expected("all-gather", axes, phase):
            continue
        source = context.module.computations[computation].instructions[name]
        if sum(gather.collective.count for gather in gathers) > max(1, context.execution_counts.times[computation]):
            found.append(_finding(context, source, gathers))
    yield from found
    if not found:  # The compiler for CPUs moves a gather out of a loop, those for accelerators do not.
        yield from _traced(context)


def _traced(context: ProgramContext) -> Iterator[GatheredTwice]:
    """Yield gathers that the jaxpr has in a loop and that return the same in each iteration."""
    for one in context.traced(GatheredTwice.id):
        shape, times = Shape(one.dtype, one.dims), one.count - one.count // one.figures["iterations"]
        size = shape.bytes * context.degree(one.axes)
        if size >= LEAST_BYTES:
            yield GatheredTwice(
                tensor="an array",
                shape=shape,
                axes=one.axes,
                phase=phase_of(one.figures["scope"]),
                num_gathers=1,
                iterations=one.figures["iterations"],
                bytes=size * times,
                cost_seconds=context.collective_seconds("all-gather", size, one.axes, count=times),
                source=one.source,
            )


def _finding(context: ProgramContext, source: Instruction, gathers: list[CompiledCollective]) -> Finding:
    first, runs = gathers[0].collective, max(1, context.execution_counts.times[source.computation])
    times = sum(gather.collective.count for gather in gathers)
    size = source.shape.bytes * context.degree(first.axes)
    return GatheredTwice(
        tensor=source.op_name or source.name,
        shape=source.shape,
        axes=first.axes,
        phase=first.phase,
        num_gathers=len(gathers),
        iterations=times // runs,
        bytes=size * (times - runs),
        cost_seconds=context.collective_seconds("all-gather", size, first.axes, count=times - runs),
        source=gathers[-1].collective.source,
    )
