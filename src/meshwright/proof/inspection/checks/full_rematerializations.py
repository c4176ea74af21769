"""Values that the partitioner all-gathers fully to reshard them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from meshwright.description.hlo.shapes import Shape
from meshwright.description.hlo.specs import Spec
from meshwright.proof.compiler.full_rematerializations import read_full_rematerializations
from meshwright.proof.inspection.context import ProgramContext
from meshwright.proof.inspection.finding import Finding, FindingKind
from meshwright.units import show_bytes


@dataclass(frozen=True, kw_only=True)
class GatheredToReshard(Finding):
    """A value that is fully all-gathered to reshard it.

    shape: the value's per-device shape before the gather. before, after: its shardings. op: the name of the HLO op.
    """

    kind = FindingKind.FULL_REMATERIALIZATION

    shape: Shape
    before: Spec | str
    after: Spec | str
    op: str

    def _sentences(self) -> tuple[str, str]:
        return (
            f"{self.shape} a device goes from {self.before} to {self.after} by being gathered whole,"
            f" {show_bytes(self.bytes)} on every device, and cut again ({self.op})",
            "keep each axis on a dim that the op keeps, or constrain the value in between to a sharding that differs"
            " from either in one axis",
        )


def full_rematerializations(context: ProgramContext) -> Iterator[Finding]:
    """Yield the involuntary full rematerializations that XLA warned of."""
    if context.program is None:
        return
    for value in read_full_rematerializations(context.program, context.mesh):
        axes: tuple[str, ...] = ()
        if isinstance(value.before, Spec):
            axes = (*(axis for dim in value.before.dims for axis in dim or ()), *value.before.unreduced)
        size = value.array.bytes * context.degree(axes)
        yield GatheredToReshard(
            shape=value.array,
            before=value.before,
            after=value.after,
            op=value.op,
            bytes=size,
            cost_seconds=context.collective_seconds("all-gather", size, axes),
            source=value.source,
        )
