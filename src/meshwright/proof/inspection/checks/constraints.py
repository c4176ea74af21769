"""Sharding constraints that have no effect."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from meshwright.description.hlo.shapes import Shape
from meshwright.description.hlo.specs import Spec
from meshwright.proof.compiler.shardings import ShardingPair
from meshwright.proof.inspection.context import ProgramContext
from meshwright.proof.inspection.finding import Finding, FindingKind, joined


@dataclass(frozen=True, kw_only=True)
class DroppedConstraint(Finding):
    """A constraint that JAX drops: nothing uses its result, or it is a `device_put` inside `jit`.

    device: the spec or the device of the `device_put`, as text; '' for a constraint.
    """

    kind = FindingKind.CONSTRAINT_WITHOUT_EFFECT

    shape: Shape
    device: str

    def _sentences(self) -> tuple[str, str]:
        if self.device.startswith("P("):
            return (
                f"device_put of {self.shape} to {self.device} is inside of jit, where JAX drops it: the value stays as"
                " it was",
                "use jax.lax.with_sharding_constraint in its place, or jax.reshard where the axes are explicit",
            )
        if self.device:
            return (
                f"device_put of {self.shape} to {self.device} is inside of jit, which runs on all of its devices: it"
                " does nothing",
                "put it on devices before the call, or constrain it by a NamedSharding",
            )
        return (
            f"nothing uses the result of with_sharding_constraint on {self.shape}; the value stays as it was",
            "continue with what it returns: x = with_sharding_constraint(x, …)",
        )


@dataclass(frozen=True, kw_only=True)
class UnevenConstraint(Finding):
    """A constraint whose axes' degree does not divide the dim: the partitioner pads it.

    shape: the global shape. dim: the index of the dim. padded: its size with padding.
    """

    kind = FindingKind.CONSTRAINT_WITHOUT_EFFECT
    merged_by = ("degree", "padded")

    shape: Shape
    dim: int
    axes: tuple[str, ...]
    degree: int
    padded: int

    def _sentences(self) -> tuple[str, str]:
        size = self.shape.dims[self.dim]
        return (
            f"dim {self.dim} of {self.shape} does not divide over {joined(self.axes)}={self.degree}:"
            f" {size} % {self.degree} = {size % self.degree}; it is padded to {self.padded} inside the program,"
            " and whole again wherever it leaves it",
            f"make the dim a multiple of {self.degree}, as {self.padded}, or constrain another dim",
        )


@dataclass(frozen=True, kw_only=True)
class OverruledConstraint(Finding):
    """A constraint on a value to which the partitioner gave another sharding."""

    kind = FindingKind.CONSTRAINT_WITHOUT_EFFECT

    shape: Shape
    requested: Spec
    actual: Spec

    def _sentences(self) -> tuple[str, str]:
        return (
            f"{self.shape} was constrained to {self.requested} and has {self.actual}",
            "look for another constraint on the same value, and keep one",
        )


def constraints_without_effect(context: ProgramContext) -> Iterator[Finding]:
    """Yield constraints whose results are unused, that do not divide the dim they shard, or that were overruled."""
    if context.program is None:
        return
    for one in context.traced(DroppedConstraint.id):
        shape, device = Shape(one.dtype, one.dims), one.figures["device"]
        if context.module.num_devices > 1 or not device:
            yield DroppedConstraint(shape=shape, device=device, bytes=shape.bytes, cost_seconds=None, source=one.source)
    for pair in context.shardings:
        if pair.role == "intermediate" and pair.requested is not None:
            yield from _uneven(context, pair, pair.requested)
            if pair.actual is not None and not pair.is_satisfied:
                yield OverruledConstraint(
                    shape=pair.array,
                    requested=pair.requested,
                    actual=pair.actual,
                    bytes=pair.array.bytes,
                    cost_seconds=None,
                    source=pair.source,
                )


def _uneven(context: ProgramContext, pair: ShardingPair, requested: Spec) -> Iterator[Finding]:
    for dim, (size, axes) in enumerate(zip(pair.array.dims, requested.dims, strict=False)):
        degree = context.degree(axes or ())
        if size % degree:
            yield UnevenConstraint(
                shape=pair.array,
                dim=dim,
                axes=axes or (),
                degree=degree,
                padded=-(-size // degree) * degree,
                bytes=pair.array.bytes,
                cost_seconds=None,
                source=pair.source,
            )
