"""Branches in which some devices compute while others wait, as in uneven pipeline stages."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from meshwright.description.hlo.evaluation import evaluate
from meshwright.description.hlo.module import CALL_KEYS, Instruction
from meshwright.proof.inspection.checks.redundant_compute import SHARE_OF_WORK
from meshwright.proof.inspection.context import ProgramContext
from meshwright.proof.inspection.finding import Finding, FindingKind
from meshwright.units import show_flops, show_percent


@dataclass(frozen=True, kw_only=True)
class UnevenStages(Finding):
    """Branches with different amounts of work, chosen by a device's position along mesh axes.

    Flops are per device and step. busiest_flops: of the device with most work. mean_flops: the mean over devices.
    """

    kind = FindingKind.UNEVEN_STAGES
    merged_by = ("axes",)
    is_share_of_work = True

    axes: tuple[str, ...]
    busiest_flops: float
    mean_flops: float

    def _sentences(self) -> tuple[str, str]:
        axes, idle = "*".join(self.axes), 1 - self.mean_flops / self.busiest_flops
        return (
            f"along {axes} the busiest device does {show_flops(self.busiest_flops)} in this branch and the average one"
            f" {show_flops(self.mean_flops)}; the others wait {show_percent(idle)} of it",
            f"give every stage along {axes} the same work: move layers from the longest branch to the others",
        )


def uneven_stages(context: ProgramContext) -> Iterator[Finding]:
    """Yield branches that devices take by their position on the mesh, with more work in some than in others."""
    total = sum(work.flops for work in context.products)
    for instruction in context.module.instructions():
        times = context.execution_counts.times[instruction.computation]
        if instruction.opcode != "conditional" or not times:
            continue
        flops = _by_device(context, instruction)
        if flops is None or not (lost := float(flops.max() - flops.mean())) or lost < SHARE_OF_WORK * total:
            continue
        yield UnevenStages(
            axes=tuple(sorted(context.variance.axes(context.module.operand(instruction)))),
            busiest_flops=float(flops.max()),
            mean_flops=float(flops.mean()),
            bytes=0,
            cost_seconds=context.flop_seconds(lost),
            source=context.place(instruction),
        )


def _by_device(context: ProgramContext, conditional: Instruction) -> np.ndarray | None:
    """Return the flops of each device's branch; None if the program does not determine which branch it takes."""
    names = conditional.branches
    predicate = context.module.operand(conditional)
    taken = evaluate(context.module, predicate, context.module.num_devices)
    if taken is None or taken.size != context.module.num_devices:
        return None
    if predicate.shape.dtype == "pred":  # it takes the first of the two where it is true
        taken = 1 - np.minimum(taken, 1)
    flops = np.array([_flops_within(context, name) for name in names])
    index = taken.ravel()
    # An index out of range takes the last branch.
    return flops[np.where((index < 0) | (index >= len(names)), len(names) - 1, index)]


def _flops_within(context: ProgramContext, computation: str) -> int:
    """Return the flops per step of everything that a computation runs."""
    waiting, seen = [computation], {computation}
    while waiting:
        for instruction in context.module.computations[waiting.pop()].instructions.values():
            called = set(instruction.called(*CALL_KEYS)) - seen
            seen |= called
            waiting += called
    return sum(work.flops for work in context.products if work.instruction.computation in seen)
