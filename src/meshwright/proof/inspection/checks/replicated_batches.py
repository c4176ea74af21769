"""Batches that are replicated along a data-parallel axis."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from meshwright.description.hlo.shapes import Shape
from meshwright.proof.inspection.checks.redundant_compute import redundant_compute
from meshwright.proof.inspection.context import ProgramContext
from meshwright.proof.inspection.finding import Finding, FindingKind

_SPLITS_DATA = re.compile(r"(?:f?s?dp|data|batch|replica|zero)s?(?:_?(?:parallel|axis|\d+))?", re.IGNORECASE)
"""Usual names of axes that split the batch. Shardings alone do not tell them from axes of tensor parallelism."""


@dataclass(frozen=True, kw_only=True)
class ReplicatedBatch(Finding):
    """A batch of a train step that is not split over an axis whose name says that it splits data."""

    kind = FindingKind.REPLICATED_BATCH
    merged_by = ("axis",)

    name: str
    shape: Shape
    axis: str
    degree: int

    def _sentences(self) -> tuple[str, str]:
        return (
            f"{self.name} {self.shape} is whole on each of {self.degree} devices along {self.axis}, which splits no"
            " other data: they work on the same examples, and parameters or activations move instead",
            f"split its first dim over {self.axis} before the step: device_put with a NamedSharding, or jit's"
            " in_shardings",
        )


def replicated_batches(context: ProgramContext) -> Iterator[Finding]:
    """Yield data of train steps not split over axes named for data, unless repeated work on the axis is reported."""
    if not context.is_train_step:
        return
    # Data have at least two dims, and no result of the step has their shape.
    results = {(one.dtype, one.dims) for one in context.module.root(context.module.entry).shape.arrays()}
    shapes = ((one, one.instruction.shape) for one in context.arguments if one.spec is not None)
    data = [one for one, shape in shapes if len(shape.dims) > 1 and (shape.dtype, shape.dims) not in results]
    repeated = {getattr(finding, "axis", "") for finding in redundant_compute(context)}
    for axis, degree in context.mesh.items():
        if degree < 2 or not _SPLITS_DATA.fullmatch(axis) or axis in repeated:
            continue
        if any(one.spec and axis in one.spec.axes for one in data):
            continue
        fits = [one for one in data if any(dim % degree == 0 for dim in one.instruction.shape.dims)]
        for one in fits:
            size = one.instruction.shape.bytes
            yield ReplicatedBatch(
                name=one.name,
                shape=one.instruction.shape,
                axis=axis,
                degree=degree,
                bytes=size - size // degree,
                cost_seconds=0.0 if context.system else None,
                source=context.first_use(one.instruction),
            )
