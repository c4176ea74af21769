"""All-reduces whose result each device slices to its shard: a reduce-scatter would suffice."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from meshwright.description.hlo.dataflow import VIEWS, uses
from meshwright.description.hlo.module import Instruction
from meshwright.proof.inspection.checks.duplicate_gathers import LEAST_BYTES
from meshwright.proof.inspection.context import CompiledCollective, ProgramContext
from meshwright.proof.inspection.finding import Finding, FindingKind, joined
from meshwright.record import Phase
from meshwright.units import show_bytes

_ELEMENTWISE = frozenset(
    {"add", "subtract", "multiply", "divide", "negate", "sqrt", "rsqrt", "power", "maximum", "minimum"}
    | {"convert", "select", "abs", "exponential", "log", "tanh", "reduce-window"}
)
"""Ops that may be between a sum and its slicing. XLA:CPU first reduces large arrays by windows to compute norms."""

_LEAST_AT_ONCE = 1 << 18
"""Below this size, compilers that have a reduce-scatter prefer an all-reduce: slicing would save too little."""


@dataclass(frozen=True, kw_only=True)
class SlicedAllReduce(Finding):
    """An all-reduce of whose result each device uses only its shard.

    is_sliced_at_once: whether the sum is sliced before any other op. reduced_bytes: bytes of all such sums per step.
    """

    kind = FindingKind.SLICED_ALL_REDUCE
    merged_by = ("is_sliced_at_once",)

    array: str
    axes: tuple[str, ...]
    phase: Phase
    reduced_bytes: int
    is_sliced_at_once: bool

    def _sentences(self) -> tuple[str, str]:
        return (
            f"all-reduce of {self.array} over {joined(self.axes)} in {self.phase}, of which every device then takes a"
            f" share: {show_bytes(self.reduced_bytes)} are sent back to all for nothing",
            (
                "the program takes its share at once, yet the compiler sums it whole: sum it with psum_scatter in"
                " shard_map, or store the parameter split along another dim"
            )
            if self.is_sliced_at_once
            else (
                "constrain the sum (the gradient) to the sharding of what it is added to (the parameter), before"
                " anything is computed with it; take norms of the shards"
            ),
        )


def sliced_all_reduces(context: ProgramContext) -> Iterator[Finding]:
    """Yield all-reduces of whole arrays of which each device then uses a shard."""
    scattered = {id(move.instruction) for move in context.collectives if move.collective.kind == "reduce-scatter"}
    for move in context.collectives:
        one = move.collective
        if move.kind != "all-reduce" or one.bytes < LEAST_BYTES:
            continue
        is_large = one.bytes >= one.count * _LEAST_AT_ONCE
        is_sliced_at_once = one.kind == "reduce-scatter" and context.has_reduce_scatter and is_large
        is_sliced_at_once = is_sliced_at_once and not _is_summed_further(context, move)
        # If an instruction's result is sliced at once along some axes, its sum over the other axes is of that slice.
        is_whole = one.kind == "all-reduce" and id(move.instruction) not in scattered
        single = is_whole and len(move.instruction.operands) == 1
        if is_sliced_at_once or (single and _is_sliced_later(context, move.instruction)):
            yield SlicedAllReduce(
                array=one.array,
                axes=one.axes,
                phase=one.phase,
                reduced_bytes=one.bytes,
                is_sliced_at_once=is_sliced_at_once,
                bytes=one.bytes - one.bytes // context.degree(one.axes),
                cost_seconds=one.seconds / 2 if one.seconds is not None else None,
                source=one.source,
            )


def _is_summed_further(context: ProgramContext, move: CompiledCollective) -> bool:
    """Whether the all-reduce of `move` also sums over axes that do not slice its result, as for gradients in HSDP.

    XLA sums over all these axes at once, whatever the program's constraints are.
    """
    return any(
        other.instruction is move.instruction
        and other.collective.kind == "all-reduce"
        and not set(other.collective.axes) & set(move.collective.axes)
        for other in context.collectives
    )


def _is_sliced_later(context: ProgramContext, instruction: Instruction) -> bool:
    """Whether a sum is only used elementwise until it is sliced by the device's id, or reduced to scalars."""
    cut = False
    for user, held in uses(context.module, instruction, VIEWS | _ELEMENTWISE):
        if user.opcode == "dynamic-slice" and user.operands[0] == held.name:
            offsets = context.module.operands(user)[1:]
            if not any(context.variance.axes(offset) for offset in offsets):
                return False
            cut = True
        elif user.shape.dtype == "tuple" or user.shape.size > 1:
            return False
    return cut
