"""The four cases of a sharded matmul, decided for each mesh axis and numbered as in the scaling book.

1: the axis shards no summed dim. 2: it shards a summed dim in some operands. 3: it shards a summed dim in all operands
that have the dim. 4: it shards different dims of the result in different operands.

Source: jax-ml.github.io/scaling-book/sharding, "Computation with sharded arrays".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from meshwright.description.notation.array import ShardedArray

Case = Literal[1, 2, 3, 4]


@dataclass(frozen=True)
class AxisCase:
    """The case of one mesh axis in an einsum.

    dims: the dims that decide the case. operands: in cases 2 and 3, labels of the operands whose summed dim the axis
    shards.
    """

    axis: str
    case: Case
    dims: tuple[str, ...]
    operands: tuple[str, ...] = ()

    @property
    def reason(self) -> str:
        """The reason for the case as text: which dims the axis splits."""
        dims, held = " and ".join(self.dims), " and ".join(self.operands)
        if self.case == 4:
            return f"{self.axis} splits {dims}, which the result would both have"
        if self.case == 1:
            return f"{self.axis} splits {dims}, which is not summed"
        return f"{self.axis} splits the summed {dims} in {held}" + (" only" if self.case == 2 else "")


def axis_cases(operands: tuple[ShardedArray, ...], result_dims: tuple[str, ...]) -> tuple[AxisCase, ...]:
    """Return the case of every axis that splits an operand, in the order in which the axes appear."""
    axes = dict.fromkeys(axis for operand in operands for axis in operand.split_axes)
    return tuple(_axis_case(axis, operands, result_dims) for axis in axes)


def _axis_case(axis: str, operands: tuple[ShardedArray, ...], result_dims: tuple[str, ...]) -> AxisCase:
    """Return the highest of the four cases that applies to one mesh axis."""
    dim_in = {operand.label: dim for operand in operands if (dim := operand.dim_of(axis))}
    kept = list(dict.fromkeys(dim for dim in dim_in.values() if dim in result_dims))
    summed = list(dict.fromkeys(dim for dim in dim_in.values() if dim not in result_dims))
    if len(kept) > 1:
        return AxisCase(axis, 4, tuple(kept))
    for dim in summed:
        holders = [operand.label for operand in operands if dim in operand.dims]
        if all(dim_in.get(label) == dim for label in holders):
            return AxisCase(axis, 3, (dim,), tuple(holders))
    if summed:
        return AxisCase(axis, 2, (summed[0],), tuple(label for label, dim in dim_in.items() if dim == summed[0]))
    return AxisCase(axis, 1, (kept[0],))
