"""Batches, masks and tables that are replicated along an axis that should split them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from meshwright.description.hlo.shapes import Shape
from meshwright.proof.inspection.checks.redundant_compute import redundant_compute
from meshwright.proof.inspection.context import ProgramContext
from meshwright.proof.inspection.finding import Finding, FindingKind, joined
from meshwright.proof.inspection.slices import cut_axes
from meshwright.units import show_bytes

SPLITS_DATA = re.compile(r"(?:f?s?dp|data|batch|replica|zero)s?(?:_?(?:parallel|axis|\d+))?", re.IGNORECASE)
"""Usual names of axes that split the batch. Shardings alone do not distinguish them from tensor parallel axes."""

_LEAST_BYTES = 1 << 14
"""Smaller tables cost nothing, and are not reported."""


@dataclass(frozen=True, kw_only=True)
class ReplicatedBatch(Finding):
    """A batch of a train step that is not split over an axis named like a data axis."""

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
    """Yield batches of a train step that are not split over an axis named like a data axis.

    Axes along which matmuls are repeated are skipped: `redundant_compute` reports them.
    """
    if not context.is_train_step:
        return
    # Data have at least two dims, and no result of the step has their shape.
    results = {(one.dtype, one.dims) for one in context.module.root(context.module.entry).shape.arrays()}
    shapes = ((one, one.instruction.shape) for one in context.arguments if one.spec is not None)
    unreturned = [(one, shape) for one, shape in shapes if (shape.dtype, shape.dims) not in results]
    data = [one for one, shape in unreturned if len(shape.dims) > 1]
    repeated = {getattr(finding, "axis", "") for finding in redundant_compute(context)}
    for axis, degree in context.mesh.items():
        if degree < 2 or not SPLITS_DATA.fullmatch(axis) or axis in repeated:
            continue
        if any(one.spec and axis in one.spec.axes for one, _ in unreturned):
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
                cost_seconds=context.no_seconds,
                source=context.first_use(one.instruction),
            )


@dataclass(frozen=True, kw_only=True)
class WholeBesideBatch(Finding):
    """A replicated argument of which each device uses a slice.

    like: the argument that `axes` split in the same way.
    """

    kind = FindingKind.WHOLE_BESIDE_BATCH
    merged_by = ("name",)

    name: str
    shape: Shape
    axes: tuple[str, ...]
    like: str

    def _sentences(self) -> tuple[str, str]:
        over = joined(self.axes)
        return (
            f"{self.name} {self.shape} is whole on every device along {over}, which splits {self.like}: each device"
            f" uses its own part, and holds {show_bytes(self.bytes)} for nothing",
            f"give it the sharding of {self.like} on the dims that they share: device_put with a NamedSharding with"
            f" {over}, or make it inside of the function from jnp.arange, where the partitioner splits it",
        )


def whole_tables(context: ProgramContext) -> Iterator[Finding]:
    """Yield replicated arguments that every device slices to match its shard of the data."""
    split = [
        (number, one, place, size * context.degree(axes), axes)
        for number, one in enumerate(context.arguments)
        if one.spec is not None
        for place, (size, axes) in enumerate(zip(one.instruction.shape.dims, one.spec.dims, strict=True))
        if axes
    ]
    for number, argument in enumerate(context.arguments):
        shape = argument.instruction.shape
        if argument.spec is None or shape.bytes < _LEAST_BYTES:
            continue
        if number in context.updated:
            continue
        axes = tuple(axis for axis in cut_axes(context, argument.instruction) if axis not in argument.spec.axes)
        is_table = shape.dtype[:1] in ("p", "s", "u") or shape.dims[-1:] == shape.dims[-2:-1]
        like = next(
            (
                one.name
                for other, one, place, size, by in split
                if one.tree != argument.tree or (not place and _is_data(context, other, by))
                if set(by) <= set(axes)
                if shape.dims[place : place + 1] == (size,) or (is_table and size in shape.dims)
            ),
            None,
        )
        if axes and like is not None:
            yield WholeBesideBatch(
                name=argument.name,
                shape=shape,
                axes=axes,
                like=like,
                bytes=shape.bytes - shape.bytes // context.degree(axes),
                cost_seconds=context.no_seconds,
                source=context.first_use(argument.instruction),
            )


def _is_data(context: ProgramContext, number: int, axes: tuple[str, ...]) -> bool:
    """Whether an argument, by its number, whose first dim the axes split is an array of a batch, not a weight."""
    is_named = all(axis in context.batch_axes or SPLITS_DATA.fullmatch(axis) for axis in axes)
    is_gathered = context.arguments[number].instruction.name in context.gathered
    return is_named and not is_gathered and number not in context.updated
