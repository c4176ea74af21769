"""State that a step moves whole but changes little, and results that are gathered only to be returned."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from meshwright.description.hlo.dataflow import VIEWS, origin
from meshwright.description.hlo.shapes import Shape
from meshwright.proof.inspection.checks.redundant_compute import RedundantCompute
from meshwright.proof.inspection.checks.unexpected_collectives import (
    ASKED_FOR,
    CONSTRAINS,
    UnexpectedCollective,
    primitive_of,
)
from meshwright.proof.inspection.context import ProgramContext
from meshwright.proof.inspection.finding import Finding, FindingKind, joined
from meshwright.proof.inspection.slices import ELEMENTWISE
from meshwright.record import Kind
from meshwright.units import show_bytes

_LEAST_RESULT = 1 << 16
"""In bytes. Smaller results are metrics to print, and are not reported."""

_MOVES = ("all-gather", "all-to-all", "collective-permute")
_WRITTEN = frozenset(VIEWS | {"convert", "slice", "dynamic-slice", "dynamic-update-slice"})
"""Ops that may be between a cache and the moved value."""


@dataclass(frozen=True, kw_only=True)
class MovedState(Finding):
    """State that a step other than a train step moves between devices.

    count: times per step.
    """

    kind = FindingKind.MOVED_STATE
    merged_by = ("name", "axes")
    is_merged_across_sources = True

    name: str
    shape: Shape
    collective: Kind
    axes: tuple[str, ...]
    count: int

    def explains(self, other: Finding) -> bool:
        """Whether this move causes `other`: redundant compute or an unexpected collective, along the same axes."""
        if isinstance(other, RedundantCompute):
            return other.axis in self.axes
        if not isinstance(other, UnexpectedCollective) or not other.is_of_shardings:
            return False
        return other.axes == self.axes and other.line == self.line

    def _sentences(self) -> tuple[str, str]:
        times = f", {self.count} times" if self.count > 1 else ""
        return (
            f"{self.name} {self.shape} is state of the step, and is moved in each call: {self.collective} over"
            f" {joined(self.axes)}{times}, {show_bytes(self.bytes)} a device and step",
            "store it as the step uses it: give it the sharding that its constraint asks for, and split a dim that is"
            " not written or read at one place (heads or batch of a cache, not positions)",
        )


@dataclass(frozen=True, kw_only=True)
class GatheredResult(Finding):
    """A computed result that is fully all-gathered only to be returned."""

    kind = FindingKind.GATHERED_RESULT
    merged_by = ("axes",)

    name: str
    shape: Shape
    axes: tuple[str, ...]

    def explains(self, other: Finding) -> bool:
        """Whether `other` reports the all-gather of this result as an unexpected collective."""
        return isinstance(other, UnexpectedCollective) and other.axes == self.axes and other.line == self.line

    def _sentences(self) -> tuple[str, str]:
        over = joined(self.axes)
        name = f"result {self.name}" if self.name else "the result"
        return (
            f"{name} {self.shape} is gathered over {over} to be returned whole on every device:"
            f" {show_bytes(self.bytes)} a device and step, and as much memory",
            f"return it split as it is computed: out_shardings (or the constraint on it, or shard_map's out_specs) with"
            f" {over}, or none at all; fetch what the host needs by jax.device_get, which gathers nothing on devices",
        )


def moved_values(context: ProgramContext) -> Iterator[Finding]:
    """Yield a `MovedState` for state that each step moves between devices, a `GatheredResult` for gathered results.

    A train step moves its state on purpose (FSDP), so that it has no `MovedState`.
    """
    if not context.is_train_step:
        yield from _moved_states(context)
    yield from _gathered_results(context)


def _moved_states(context: ProgramContext) -> Iterator[Finding]:
    by_name = {one.instruction.name: (number, one) for number, one in enumerate(context.arguments)}
    for move in context.collectives:
        # The value (a cache, say) of which the moved one is a view, a slice or an updated copy.
        value = context.module.operand(move.instruction)
        while (source := origin(context.module, value, _WRITTEN)).opcode == "select":
            value = context.module.operand(source, 1)
        number, argument = by_name.get(source.name, (-1, None))
        if argument is None or number not in context.updated or move.collective.kind not in _MOVES:
            continue
        one = move.collective
        is_by_hand = primitive_of(move.instruction) in ASKED_FOR - CONSTRAINS and number not in context.aliases.values()
        if is_by_hand or 2 * one.bytes < argument.instruction.shape.bytes:
            continue
        yield MovedState(
            name=argument.name,
            shape=context.whole_shape(argument),
            collective=one.kind,
            axes=one.axes,
            count=one.count,
            bytes=one.bytes,
            cost_seconds=one.seconds,
            source=one.source,
        )


def _gathered_results(context: ProgramContext) -> Iterator[Finding]:
    root = context.module.root(context.module.entry)
    made = context.module.operands(root) if root.opcode == "tuple" else (root,)
    gathers = {
        (move.instruction.computation, move.instruction.name): move
        for move in context.collectives
        if move.collective.kind == "all-gather" and context.source_of(move).opcode != "parameter"
    }
    for result, value in zip(context.results, made, strict=False):
        found = origin(context.module, value, frozenset(VIEWS | ELEMENTWISE))
        move = gathers.get((found.computation, found.name))
        if move is None or any(share.is_changed for share in context.updates(result).values()):
            continue
        one = move.collective
        if one.bytes >= _LEAST_RESULT:
            yield GatheredResult(
                name=result.name,
                shape=result.shape,
                axes=one.axes,
                bytes=one.bytes,
                cost_seconds=one.seconds,
                source=one.source,
            )
