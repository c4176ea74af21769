"""Work that is done more than once, or that some devices do while others wait."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from meshwright.hlo import CALL_KEYS, Instruction, evaluate
from meshwright.inspection.finding import Finding
from meshwright.inspection.subject import Subject
from meshwright.units import show_flops, show_percent

SHARE_OF_WORK = 0.05
"""The part of a step's flops below which repeated or uneven work is left alone: a router, a small projection."""


def repeated_work(subject: Subject) -> Iterator[Finding]:
    """Mesh axes along which devices compute the same products."""
    total = sum(work.flops for work in subject.products)
    for axis, degree in subject.mesh.items():
        repeated = [work for work in subject.products if axis in subject.variance.copies(work.instruction)]
        flops = sum(work.flops for work in repeated)
        if degree < 2 or flops < SHARE_OF_WORK * total or not flops:
            continue
        largest = max(repeated, key=lambda work: work.flops)
        wasted = flops - flops // degree
        yield Finding(
            kind="repeated work",
            evidence=f"{_part(flops, total)} are the same on all {degree} devices along {axis}:"
            f" {show_flops(wasted)} a device and step for nothing",
            bytes=0,
            seconds=subject.flop_seconds(wasted),
            source=subject.place(largest.instruction),
            fix=f"split a dim of these products over {axis}: give the arguments themselves a sharding with {axis}"
            " (an annotation that nothing applies has no effect), or constrain a dim of the activations to it",
        )


def uneven_stages(subject: Subject) -> Iterator[Finding]:
    """Branches that devices take by their place on the mesh, with more work in some than in others."""
    total = sum(work.flops for work in subject.products)
    for instruction in subject.module.instructions():
        times = subject.runs.times[instruction.computation]
        if instruction.opcode != "conditional" or not times:
            continue
        flops = _by_device(subject, instruction)
        if flops is None or not (lost := float(flops.max() - flops.mean())) or lost < SHARE_OF_WORK * total:
            continue
        axes = "*".join(sorted(subject.variance.axes(subject.module.operand(instruction))))
        yield Finding(
            kind="uneven stages",
            evidence=f"along {axes} the busiest device does {show_flops(float(flops.max()))} in this branch and the"
            f" average one {show_flops(float(flops.mean()))}; the others wait {show_percent(lost / flops.max())} of it",
            bytes=0,
            seconds=subject.flop_seconds(lost),
            source=subject.place(instruction),
            fix=f"give every stage along {axes} the same work: move layers from the longest branch to the others",
        )


def _part(flops: int, total: int) -> str:
    """So much of all products, in words."""
    return "all products" if flops == total else f"products with {show_percent(flops / total)} of the flops"


def _by_device(subject: Subject, conditional: Instruction) -> np.ndarray | None:
    """The flops of the branch that each device takes; None where the program does not say which."""
    names = conditional.called("branch_computations", "true_computation", "false_computation")
    predicate = subject.module.operand(conditional)
    taken = evaluate(subject.module, predicate, subject.module.num_devices)
    if taken is None or taken.size != subject.module.num_devices:
        return None
    if predicate.shape.dtype == "pred":  # it takes the first of the two where it is true
        taken = 1 - np.minimum(taken, 1)
    flops = np.array([_flops_within(subject, name) for name in names])
    index = taken.ravel()
    # An index that is none takes the last branch.
    return flops[np.where((index < 0) | (index >= len(names)), len(names) - 1, index)]


def _flops_within(subject: Subject, computation: str) -> int:
    """The flops in a step of all that a computation runs."""
    waiting, seen = [computation], {computation}
    while waiting:
        for instruction in subject.module.computations[waiting.pop()].instructions.values():
            called = set(instruction.called(*CALL_KEYS)) - seen
            seen |= called
            waiting += called
    return sum(work.flops for work in subject.products if work.instruction.computation in seen)
