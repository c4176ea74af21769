"""Arrays that take more memory than their elements need, because TPUs store them in tiles."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from meshwright.description.hlo.module import Instruction
from meshwright.description.hlo.shapes import Shape
from meshwright.proof.inspection.context import ProgramContext
from meshwright.proof.inspection.finding import Finding, FindingKind
from meshwright.units import show_bytes

_SHARE_OF_MEMORY = 0.02
"""The smallest padding reported, as a fraction of the program's memory."""

_GROWTH = 1.25
"""The smallest ratio reported of an array's bytes in memory to those of its elements."""

_MOST = 3
"""The most shapes reported, largest first."""


@dataclass(frozen=True, kw_only=True)
class PaddedArrays(Finding):
    """Arrays of one shape that do not fill their tiles.

    count: how many of them are in memory at once. stored_bytes: their total bytes with padding.
    """

    kind = FindingKind.PADDING

    shape: Shape
    count: int
    stored_bytes: int

    def _sentences(self) -> tuple[str, str]:
        many = f"{self.count} arrays {self.shape}" if self.count > 1 else str(self.shape)
        held = self.count * self.shape.bytes
        return (
            f"{many} of {show_bytes(held)} take {show_bytes(self.stored_bytes)} in memory,"
            f" {self.stored_bytes / held:.3g} times their elements: their tiles are not filled",
            "make the last dim a multiple of 128 and the one before it of 8 (bf16: 16, 8 bits: 32), as one device holds"
            " them: merge small dims, or split another dim",
        )


def padding(context: ProgramContext) -> Iterator[Finding]:
    """Yield the shapes that waste the most memory on unfilled tiles."""
    # All arguments are in memory at once; of other arrays, one per shape is counted.
    held: dict[Shape, tuple[int, Instruction]] = {}
    for argument in context.arguments:
        count, first = held.get(argument.instruction.shape, (0, argument.instruction))
        held[argument.instruction.shape] = (count + 1, first)
    fused = {name for one in context.module.instructions() for name in one.called("calls", "to_apply")}
    for instruction in context.module.instructions():
        if instruction.computation in fused or not context.execution_counts.times[instruction.computation]:
            continue
        if instruction.shape.dtype != "tuple" and instruction.shape.is_in_hbm:
            held.setdefault(instruction.shape, (1, instruction))
    floor = _SHARE_OF_MEMORY * _peak(context)
    wasted = {shape: (shape.padded_bytes - shape.bytes) * count for shape, (count, _) in held.items()}
    for shape in sorted(wasted, key=wasted.__getitem__, reverse=True)[:_MOST]:
        count, first = held[shape]
        if wasted[shape] < max(floor, 1) or shape.padded_bytes < _GROWTH * shape.bytes:
            continue
        rate = None if context.system is None else context.system.hbm_bytes_per_second
        yield PaddedArrays(
            shape=shape,
            count=count,
            stored_bytes=count * shape.padded_bytes,
            bytes=wasted[shape],
            cost_seconds=wasted[shape] / rate if rate else None,  # to read the padding once
            source=context.first_use(first) if first.opcode == "parameter" else context.place(first),
        )


def _peak(context: ProgramContext) -> int:
    """Return the program's peak memory, or the bytes of its arguments where the peak is unknown."""
    if context.program and context.program.memory_bytes:
        return context.program.memory_bytes["peak"]
    return sum(argument.instruction.shape.padded_bytes for argument in context.arguments)
