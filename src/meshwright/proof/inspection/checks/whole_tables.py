"""Masks and tables that are whole on every device beside data that is split."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from meshwright.description.hlo.shapes import Shape
from meshwright.proof.inspection.context import ProgramContext
from meshwright.proof.inspection.finding import Finding, FindingKind, joined
from meshwright.proof.inspection.slices import cut_axes
from meshwright.units import show_bytes

_LEAST_BYTES = 1 << 14
"""Smaller tables are no cost."""


@dataclass(frozen=True, kw_only=True)
class WholeBesideBatch(Finding):
    """An argument that is whole on every device, each of which uses a part of its own. like: data that is split so."""

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
    """Yield whole arguments that every device cuts to the part that belongs to its part of the data."""
    split = {
        (size * context.degree(axes), axes): one.name
        for one in context.arguments
        if one.spec is not None
        for size, axes in zip(one.instruction.shape.dims, one.spec.dims, strict=True)
        if axes
    }
    for number, argument in enumerate(context.arguments):
        shape = argument.instruction.shape
        if argument.spec is None or argument.spec.axes or shape.bytes < _LEAST_BYTES:
            continue
        if number in context.updated or number in context.differentiated & context.updated:
            continue
        axes = cut_axes(context, argument.instruction)
        like = next((name for (size, by), name in split.items() if set(by) <= set(axes) and size in shape.dims), None)
        if axes and like is not None:
            yield WholeBesideBatch(
                name=argument.name,
                shape=shape,
                axes=axes,
                like=like,
                bytes=shape.bytes - shape.bytes // context.degree(axes),
                cost_seconds=0.0 if context.system else None,
                source=context.first_use(argument.instruction),
            )
