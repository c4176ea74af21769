"""Constraints that gather a sharded value, which its users then slice again or process identically on all devices."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from meshwright.description.hlo.dataflow import VIEWS, VIEWS_AND_CASTS, uses
from meshwright.description.hlo.module import Instruction
from meshwright.description.hlo.shapes import Shape
from meshwright.description.hlo.specs import Spec
from meshwright.proof.compiler.shardings import ShardingPair
from meshwright.proof.inspection.checks.duplicate_gathers import LEAST_BYTES
from meshwright.proof.inspection.checks.redundant_compute import RedundantCompute
from meshwright.proof.inspection.checks.sliced_all_reduces import SlicedAllReduce
from meshwright.proof.inspection.checks.unexpected_collectives import UnexpectedCollective
from meshwright.proof.inspection.context import CompiledCollective, ProgramContext
from meshwright.proof.inspection.finding import Finding, FindingKind, joined, num_elements
from meshwright.proof.inspection.slices import ELEMENTWISE, cut_axes
from meshwright.units import show_bytes


@dataclass(frozen=True, kw_only=True)
class UnshardingConstraint(Finding):
    """A constraint that replicates a sharded value.

    gathers: the place of each all-gather that it causes.
    is_cut: users slice the value again; if False, all devices along the axes compute the same with it.
    """

    kind = FindingKind.UNSHARDING_CONSTRAINT

    shape: Shape
    requested: Spec
    axes: tuple[str, ...]
    gathers: tuple[str, ...]
    is_cut: bool

    def _sentences(self) -> tuple[str, str]:
        over = joined(self.axes)
        then = "its users split it again" if self.is_cut else f"all devices along {over} then compute the same with it"
        count = len(self.gathers)
        places = ", ".join(dict.fromkeys(place.partition(" ")[0].rpartition("/")[2] for place in self.gathers if place))
        return (
            f"the constraint of {self.shape} to {self.requested} makes it whole along {over}, and {then}:"
            f" {count} all-gather{'s' if count > 1 else ''}, {show_bytes(self.bytes)} a device and step"
            + (f" (at {places})" if places else ""),
            f"keep {over} in the spec of this constraint, on the dim that is split before it, or leave the constraint"
            " out",
        )

    def explains(self, other: Finding) -> bool:
        """Whether this constraint causes `other`: redundant compute or a collective along the same axes."""
        if isinstance(other, RedundantCompute):
            return other.axis in self.axes
        if isinstance(other, SlicedAllReduce):
            return num_elements(other.array) == math.prod(self.shape.dims)
        return isinstance(other, UnexpectedCollective) and other.is_of_shardings and other.axes == self.axes


def unsharding_constraints(context: ProgramContext) -> Iterator[UnshardingConstraint]:
    """Yield constraints that replicate a value which is sharded before and after, with all gathers that they cause."""
    constraints = [one for one in context.shardings if one.role == "intermediate" and one.requested is not None]
    caused: defaultdict[tuple[ShardingPair, tuple[str, ...]], list[tuple[CompiledCollective, bool]]] = defaultdict(list)
    for move in context.collectives:
        one = move.collective
        if one.kind != "all-gather" or one.bytes < LEAST_BYTES or len(move.instruction.operands) != 1:
            continue
        is_stored = context.source_of(move).opcode == "parameter"
        for whole in _products_alike(context, move) if is_stored else [move.instruction]:
            constraint = next((pair for pair in constraints if _may_cause(context, pair, whole, one.axes)), None)
            if constraint is None:
                continue
            is_cut = bool(set(one.axes) & set(cut_axes(context, whole)))
            if is_cut or is_stored or _is_computed_alike(context, move):
                caused[constraint, one.axes].append((move, is_cut))
                break
    for (constraint, axes), moves in caused.items():
        seconds = [move.collective.seconds for move, _ in moves]
        assert constraint.requested is not None
        yield UnshardingConstraint(
            shape=constraint.array,
            requested=constraint.requested,
            axes=axes,
            gathers=tuple(move.collective.source for move, _ in moves),
            is_cut=all(is_cut for _, is_cut in moves),
            bytes=sum(move.collective.bytes for move, _ in moves),
            cost_seconds=None if None in seconds else sum(one or 0.0 for one in seconds),
            source=constraint.source,
        )


def _products_alike(context: ProgramContext, move: CompiledCollective) -> list[Instruction]:
    """Return the matmuls of a gathered weight that are identical on all devices along the gathered axes."""
    users = [user for user, _ in uses(context.module, move.instruction, VIEWS_AND_CASTS)]
    alike = [one for one in users if one.opcode == "dot"]
    return [one for one in alike if set(move.collective.axes) <= set(context.variance.copies(one))]


def _may_cause(context: ProgramContext, pair: ShardingPair, whole: Instruction, axes: tuple[str, ...]) -> bool:
    """Whether a constraint (`pair`) may cause the all-gather of `whole` over `axes`.

    Its spec must omit these axes, and `whole`, the gathered value, must have the constraint's per-device shape.
    """
    spec = pair.requested
    if spec is None or any(dim is None for dim in spec.dims) or set(spec.axes) & set(axes):
        return False
    held = [size // context.degree(axes or ()) for size, axes in zip(pair.array.dims, spec.dims, strict=True)]
    shape = next(iter(whole.shape.arrays()))
    # Equal but for transposes and joined neighbours, as compilers join batch and sequence.
    ours, theirs = [[size for size in each if size > 1] for each in (held, shape.dims)]
    if sorted(ours) == sorted(theirs):
        return True
    joined = iter(ours)
    for size in theirs:
        product = 1
        while product < size:
            product *= next(joined, size + 1)
        if product != size:
            return False
    return next(joined, None) is None


def _is_computed_alike(context: ProgramContext, move: CompiledCollective) -> bool:
    """Whether matmuls of a gathered value are identical on all devices along the gathered axes."""
    products = {(one.instruction.computation, one.instruction.name) for one in context.products}
    through = VIEWS | ELEMENTWISE
    users = [user for user, _ in uses(context.module, move.instruction, through)]
    matmuls = [one for one in users if (one.computation, one.name) in products]
    return bool(matmuls) and all(set(move.collective.axes) <= set(context.variance.copies(one)) for one in matmuls)
