"""Fuse the matmuls of a sharded computation with collectives before or after them, into collective matmuls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice

from meshwright.description.notation.array import ShardedArray
from meshwright.description.notation.legality import Sizes
from meshwright.description.notation.steps import Communicate, Implementation, LocalSlice, Multiply, Step
from meshwright.execution.runtime.collective_matmul import can_overlap
from meshwright.record import Collective, wire_bytes


@dataclass(frozen=True)
class CollectiveMatmul:
    """A matmul fused with the all-gather of one of its operands, or with the reduce-scatter of its result."""

    product: Multiply
    collective: Communicate

    @property
    def is_gather(self) -> bool:
        """Whether the collective is the all-gather of an operand."""
        return self.collective.kind == "all-gather"

    @property
    def operands(self) -> tuple[ShardedArray, ...]:
        """The operands of the matmul; the gathered one as it is before the all-gather."""
        gathered = self.collective.result
        return tuple(self.collective.operand if o == gathered else o for o in self.product.operands)

    @property
    def result(self) -> ShardedArray:
        """The result; if it is reduce-scattered, after the reduce-scatter."""
        return self.product.result if self.is_gather else self.collective.result

    @property
    def formula(self) -> str:
        """The einsum, with the gathered operand first."""
        inputs, _, out = self.product.formula.partition("->")
        left, right = inputs.split(",")
        swapped = self.is_gather and self.product.operands[1] == self.collective.result
        return f"{right},{left}->{out}" if swapped else f"{left},{right}->{out}"

    @property
    def letter(self) -> str:
        """The letter of the dim that is gathered or scattered."""
        arrays = self.formula.replace("->", ",").split(",")
        position = self.collective.source if self.is_gather else self.collective.target
        assert position is not None
        return arrays[0 if self.is_gather else 2][position]


FusedStep = Step | CollectiveMatmul


def fuse_collective_matmuls(steps: Sequence[Step]) -> tuple[FusedStep, ...]:
    """Return the steps with each matmul fused with the collective of most bytes that it can overlap with, if any."""
    fused: list[FusedStep | None] = list(steps)
    for index, product in enumerate(steps):
        if isinstance(product, Multiply) and (partner := _collective_to_fuse(steps, index, product)) is not None:
            collective = steps[partner]
            assert isinstance(collective, Communicate)
            fused[index], fused[partner] = CollectiveMatmul(product, collective), None
    return tuple(step for step in fused if step is not None)


def overlapped_collectives(implementation: Implementation, sizes: Sizes) -> tuple[Collective, ...]:
    """Return an implementation's collectives after fusing; a fused one is a permute of the bytes a device sends."""
    rest = list(implementation.collectives)
    permutes = []
    for fused in fuse_collective_matmuls(implementation.steps):
        if not isinstance(fused, CollectiveMatmul):
            continue
        step = fused.collective
        gone = next(c for c in rest if (c.kind, c.axes, c.bytes) == (step.kind, step.axes, step.bytes))
        rest.remove(gone)
        sent = round(wire_bytes(step.kind, step.bytes, sizes.degree(step.axes)))
        permutes.append(replace(gone, kind="collective-permute", bytes=sent))
    return (*permutes, *rest)


def _collective_to_fuse(steps: Sequence[Step], place: int, product: Multiply) -> int | None:
    """Return the index of the largest collective that can be fused with the matmul at `place`; None if there is none.

    A collective over axes along which devices repeat the same matmul is not fused, because a collective after the
    matmul would do as well.
    """
    last_writers = {step.result.label: index for index, step in enumerate(steps[:place])}
    readers = (
        index
        for index, step in enumerate(steps[place + 1 :], place + 1)
        if isinstance(step, Communicate | LocalSlice) and step.operand.label == product.result.label
    )
    writers = [last_writers[operand.label] for operand in product.operands if operand.label in last_writers]
    fitting = {}
    for index in (*writers, *islice(readers, 1)):
        step = steps[index]
        if not isinstance(step, Communicate) or set(step.axes) & set(product.repeated_axes):
            continue
        is_gather = step.kind == "all-gather" and step.result in product.operands
        is_scatter = step.kind == "reduce-scatter" and step.operand == product.result
        if (is_gather or is_scatter) and can_overlap(product.formula, CollectiveMatmul(product, step).letter):
            fitting[index] = step.bytes
    return max(fitting, key=lambda index: fitting[index], default=None)
