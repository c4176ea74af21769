"""Batches that every device along an axis of data gets whole."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from meshwright.description.hlo.shapes import Shape
from meshwright.proof.inspection.checks.redundant_compute import redundant_compute
from meshwright.proof.inspection.context import Argument, ProgramContext
from meshwright.proof.inspection.finding import Finding, FindingKind

_SPLITS_DATA = re.compile(r"(?:f?s?dp|data|batch|replica|zero)s?(?:_?(?:parallel|axis|\d+))?", re.IGNORECASE)
"""How people name axes that split the batch: dp, fsdp, data, batch. By its shardings tensor parallelism looks alike."""


@dataclass(frozen=True, kw_only=True)
class ReplicatedBatch(Finding):
    """A batch of a train step that no dim splits over an axis which by its name splits data."""

    kind = FindingKind.REPLICATED_BATCH
    merged_by = ("axis",)

    name: str
    shape: Shape
    axis: str
    degree: int


def replicated_batches(context: ProgramContext) -> Iterator[Finding]:
    """Return data of train steps that axes which split parameters do not split, unless repeated work is reported."""
    if not context.is_train_step:
        return
    data = [one for one in context.arguments if one.spec is not None and _is_data(context, one)]
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


def _is_data(context: ProgramContext, argument: Argument) -> bool:
    """Whether an argument is data: of two dims at least, and no result of the step has its shape."""
    shape = argument.instruction.shape
    results = {(one.dtype, one.dims) for one in context.module.root(context.module.entry).shape.arrays()}
    return len(shape.dims) > 1 and (shape.dtype, shape.dims) not in results
