"""Labels for the arrays of an einsum: distinct labels for operands, new labels for results."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from itertools import chain, count
from string import ascii_uppercase

from meshwright.description.notation.array import ShardedArray


def with_distinct_labels(operands: tuple[ShardedArray, ...]) -> tuple[ShardedArray, ...]:
    """Return the operands with repeated labels numbered: `A` twice becomes A and A2."""
    distinct: list[ShardedArray] = []
    for operand in operands:
        taken = [array.label for array in (*distinct, *operands[len(distinct) + 1 :])]
        earlier = [array.label for array in distinct]
        distinct.append(replace(operand, name=_numbered(operand.label, taken)) if operand.label in earlier else operand)
    return tuple(distinct)


def default_result(operands: tuple[ShardedArray, ...]) -> ShardedArray:
    """Return the result of an einsum whose text states none: all dims that only one operand has, with their axes.

    An axis that would split two dims of the result splits only the first.
    """
    every = [dim for operand in operands for dim in operand.dims]
    dims = tuple(dim for dim in every if every.count(dim) == 1)
    axes: dict[str, tuple[str, ...]] = {}
    for operand in operands:
        used = {axis for held in axes.values() for axis in held}
        axes |= {dim: tuple(a for a in operand.axes_of(dim) if a not in used) for dim in operand.dims if dim in dims}
    taken = {operand.label for operand in operands}
    anonymous = dims and not any(operand.name for operand in operands)
    name = "" if anonymous else next(letter for letter in (*ascii_uppercase[2:], "result") if letter not in taken)
    return ShardedArray(name, dims, tuple(axes[dim] for dim in dims))


def intermediate(
    left: ShardedArray, right: ShardedArray, dims: tuple[str, ...], later: Collection[ShardedArray]
) -> str:
    """Return a name for the einsum of two operands, such as `AB`, that is the label of no `later` operand.

    If neither operand has a name, return '', unless a later operand has the joined `dims` as its label.
    """
    taken = [array.label for array in later]
    if not left.name and not right.name and dims and "".join(dims) not in taken:
        return ""
    return _numbered(left.label + right.label, taken)


def _numbered(label: str, taken: Collection[str]) -> str:
    """Return `label` if it is not taken; else the first of `label2`, `label3`, ... that is not."""
    return next(name for name in chain([label], (f"{label}{n}" for n in count(2))) if name not in taken)
