"""Sums over devices in every iteration of a loop, and gathers whose parts are only added up."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from meshwright.description.hlo.shapes import Shape
from meshwright.proof.inspection.checks.duplicate_gathers import LEAST_BYTES
from meshwright.proof.inspection.context import ProgramContext
from meshwright.proof.inspection.finding import Finding, FindingKind, joined
from meshwright.units import show_bytes


@dataclass(frozen=True, kw_only=True)
class SumInLoop(Finding):
    """A sum over devices in every iteration, whose results are only added up."""

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
            f"add up what each device has, and sum the total over {over} once, after the loop: in shard_map jax.lax.psum"
            " behind the scan (with check_vma=True: jax.lax.pcast of the parameters to varying before it); under jit a"
            " shard_map around the loop",
        )


@dataclass(frozen=True, kw_only=True)
class GatheredToSum(Finding):
    """A gather of which only the sum or mean of the parts is used."""

    kind = FindingKind.GATHERED_TO_SUM
    merged_by = ("axes",)

    array: str
    axes: tuple[str, ...]
    degree: int

    def _sentences(self) -> tuple[str, str]:
        over = joined(self.axes)
        return (
            f"{self.array} is gathered over {over}, {self.degree} parts on every device, only to be added up or"
            f" averaged: {show_bytes(self.bytes)} a device and step, and as much memory",
            f"jax.lax.pmean(x, {over!r}) or jax.lax.psum(x, {over!r}): it moves two parts instead of {self.degree}",
        )


def loop_sums(context: ProgramContext) -> Iterator[Finding]:
    """Yield sums in every iteration, and gathers that are then added up, as read in the jaxpr."""
    for one in context.traced(SumInLoop.id):
        shape, times = Shape(one.dtype, one.dims), one.count - one.count // one.figures["iterations"]
        if shape.bytes >= LEAST_BYTES:
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
