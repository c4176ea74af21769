"""Matmuls that several devices compute identically."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from meshwright.proof.inspection.context import ProgramContext
from meshwright.proof.inspection.finding import Finding, FindingKind
from meshwright.units import show_flops, show_percent

SHARE_OF_WORK = 0.05
"""The smallest redundant or uneven work reported, as a fraction of a step's flops: more than a router."""


@dataclass(frozen=True, kw_only=True)
class RedundantCompute(Finding):
    """Identical matmuls on all devices along an axis.

    Flops are per device and step. flops: of these matmuls. total_flops: of all matmuls.
    wasted_flops: flops * (1 - 1 / degree).
    """

    kind = FindingKind.REDUNDANT_COMPUTE
    merged_by = ("axis",)
    is_share_of_work = True

    axis: str
    degree: int
    flops: int
    total_flops: int
    wasted_flops: int

    def _sentences(self) -> tuple[str, str]:
        share = self.flops / self.total_flops
        which = "all products" if share == 1 else f"products with {show_percent(share)} of the flops"
        return (
            f"{which} are the same on all {self.degree} devices along {self.axis}:"
            f" {show_flops(self.wasted_flops)} a device and step for nothing",
            f"split a dim of these products over {self.axis}: give the arguments themselves a sharding with {self.axis}"
            " (an annotation that nothing applies has no effect), or constrain a dim of the activations to it",
        )


def redundant_compute(context: ProgramContext) -> Iterator[Finding]:
    """Yield mesh axes along which all devices compute the same matmuls."""
    total = sum(work.flops for work in context.products)
    for axis, degree in context.mesh.items():
        repeated = [work for work in context.products if axis in context.variance.copies(work.instruction)]
        flops = sum(work.flops for work in repeated)
        if degree < 2 or flops < SHARE_OF_WORK * total or not flops:
            continue
        largest = max(repeated, key=lambda work: work.flops)
        wasted = flops - flops // degree
        yield RedundantCompute(
            axis=axis,
            degree=degree,
            flops=flops,
            total_flops=total,
            wasted_flops=wasted,
            bytes=0,
            cost_seconds=context.flop_seconds(wasted),
            source=context.place(largest.instruction),
        )
