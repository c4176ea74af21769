"""Results that are declared replicated along an axis but differ between its devices."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from meshwright.description.hlo.dataflow import VIEWS_AND_CASTS, origin
from meshwright.description.hlo.shapes import Shape
from meshwright.proof.inspection.context import ProgramContext
from meshwright.proof.inspection.finding import Finding, FindingKind, joined


@dataclass(frozen=True, kw_only=True)
class MissingSum(Finding):
    """A result of `shard_map` that differs along mesh axes, although its sharding declares it replicated there."""

    kind = FindingKind.MISSING_SUM
    merged_by = ("axes",)

    name: str
    shape: Shape
    axes: tuple[str, ...]
    degree: int

    @property
    def is_wrong(self) -> bool:
        """Always True: each device continues with another value."""
        return True

    def _sentences(self) -> tuple[str, str]:
        name = f"result {self.name}" if self.name else "the result"
        return (
            f"{name} {self.shape} is said to be the same on all {self.degree} devices along {joined(self.axes)}, and"
            " each has its own: shard_map does not check that (check_vma=False)",
            f"sum it over {joined(self.axes)} (psum) before it leaves shard_map, or name {joined(self.axes)} in"
            " out_specs; check_vma=True refuses it",
        )


def missing_sums(context: ProgramContext) -> Iterator[Finding]:
    """Yield results of `shard_map` that differ along axes over which nothing sums or gathers them.

    Only manual code can do that: the partitioner's results are equal wherever their sharding requires it. Axes with
    point-to-point sends are skipped, since rings may gather or sum too.
    """
    if context.program is None:
        return
    for one in context.traced(MissingSum.id):
        yield MissingSum(
            name="",
            shape=Shape(one.dtype, one.dims),
            axes=one.axes,
            degree=context.degree(one.axes),
            bytes=Shape(one.dtype, one.dims).bytes,
            cost_seconds=context.no_seconds,
            source=one.source,
        )
    if context.is_traced:
        return
    sent = {
        axis
        for _, entries in context.communicating_instructions
        for entry in entries
        if entry.kind in ("collective-permute", "all-to-all")
        for axis in entry.axes
    }
    root = context.module.root(context.module.entry)
    results = context.module.operands(root) if root.opcode == "tuple" else (root,)
    outputs = [pair for pair in context.shardings if pair.role == "output"]
    for pair, value in zip(outputs, results, strict=False):
        made = origin(context.module, value, VIEWS_AND_CASTS)
        if pair.actual is None or "shard_map" not in made.op_name:
            continue
        split = {*sent, *pair.actual.axes, *pair.actual.unreduced}
        axes = tuple(axis for axis in context.mesh if axis in context.variance.axes(value) and axis not in split)
        if axes:
            yield MissingSum(
                name=pair.name,
                shape=value.shape,
                axes=axes,
                degree=context.degree(axes),
                bytes=value.shape.bytes,
                cost_seconds=context.no_seconds,
                source=context.place(made),
            )
