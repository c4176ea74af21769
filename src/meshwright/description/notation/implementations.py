"""Every implementation of an einsum, or of a resharding of one array.

An implementation assigns each mesh axis to a dim that it shards during the local einsum, or to none. An axis on a dim
of the result divides the work, an axis on a summed dim leaves partial sums, and an axis on no dim repeats the work. The
operands are resharded to the assignment and multiplied, and the result is resharded to the target. So "gather B",
"slice A and reduce C" and "gather C afterwards" are three assignments, and all are listed.

More than two operands are multiplied in pairs from left to right, with one local einsum for each pair. A dim is summed
as soon as neither a later operand nor the result has it, and an intermediate is reduced before it is used. An
intermediate is continued only from implementations that are Pareto-optimal in flops and in bytes over each axis.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

from meshwright.description.notation.array import ShardedArray
from meshwright.description.notation.legality import Sizes, is_legal
from meshwright.description.notation.names import intermediate
from meshwright.description.notation.reshard import Move, reshard, reshardings
from meshwright.description.notation.steps import Communicate, Implementation, Multiply
from meshwright.errors import MeshwrightError
from meshwright.record import wire_bytes

Assignment = dict[str, tuple[str, ...]]
"""For each dim of a pair of arrays, the axes that shard it while the pair is multiplied."""


def implementations_of(operands: tuple[ShardedArray, ...], wanted: ShardedArray, sizes: Sizes) -> list[Implementation]:
    """Return every implementation of an einsum, in the order of `sorted_implementations`.

    Args:
        operands: legal arrays with distinct labels; one array for a resharding.
        wanted: the result.
        sizes: the mesh and the sizes of dims.

    Raises:
        MeshwrightError: `wanted` is a partial sum over an axis that shards no dim which the last local einsum sums.
    """
    if len(operands) == 1:
        return sorted_implementations(
            [Implementation(steps=moves, result=wanted) for moves in reshardings(operands[0], wanted, sizes)], sizes
        )
    candidates = [Implementation(steps=(), result=operands[0])]
    for index, right in enumerate(operands[1:], 2):
        candidates = [
            Implementation(steps=first.steps + more.steps, result=more.result)
            for first in candidates
            for more in _pair(first.result, right, operands[index:], wanted, sizes)
        ]
        if len(operands) > 2:
            candidates = _pareto_optimal(candidates, sizes)
    if not candidates:
        axes = ", ".join(wanted.unreduced)
        raise MeshwrightError(f"{wanted} cannot stay a sum over {axes}: they divide no dim that the last product sums")
    return sorted_implementations(candidates, sizes)


def sorted_implementations(candidates: list[Implementation], sizes: Sizes) -> list[Implementation]:
    """Return the implementations sorted by bytes sent per device, then flops, then number of steps.

    An implementation is dropped if it has all the collectives of an earlier one and no fewer flops.
    """

    def effort(candidate: Implementation) -> tuple[int, int, int]:
        return sum(_sent(step, sizes) for step in candidate.communications), candidate.flops, len(candidate.steps)

    kept: list[tuple[set[Communicate], Implementation]] = []
    for candidate in sorted(candidates, key=effort):
        done = set(candidate.communications)
        if not any(less <= done and w.flops <= candidate.flops for less, w in kept):
            kept.append((done, candidate))
    return [candidate for _, candidate in kept]


def _pair(
    left: ShardedArray, right: ShardedArray, later: tuple[ShardedArray, ...], wanted: ShardedArray, sizes: Sizes
) -> Iterator[Implementation]:
    """Yield the implementations of the einsum of two arrays.

    Its result is `wanted` or, if `later` operands are left, an intermediate.
    """
    dims = tuple(dict.fromkeys(left.dims + right.dims))
    needed = {dim for array in (*later, wanted) for dim in array.dims}
    kept = tuple(dim for dim in dims if dim in needed) if later else wanted.dims
    name = intermediate(left, right, kept, later) if later else wanted.name
    for assignment in _assignments((left, right, wanted), dims, tuple(dim for dim in dims if dim not in kept)):
        operands = (_assigned(left, assignment), _assigned(right, assignment))
        partial = tuple(axis for dim in dims if dim not in kept for axis in assignment[dim])
        result = ShardedArray(name, kept, tuple(assignment[dim] for dim in kept), partial)
        possible = later or set(wanted.unreduced) <= set(partial)
        if not possible or not all(is_legal(array, sizes) for array in (*operands, result)):
            continue
        before = reshard(left, operands[0], sizes) + reshard(right, operands[1], sizes)
        # 2 flops for each index of all dims, or 1 if no dim is summed (jax-ml.github.io/scaling-book/transformers,
        # "Counting dots").
        operations = 2 if len(assignment) > len(result.dims) else 1
        sharding = {axis for axes in assignment.values() for axis in axes}
        product = Multiply(
            operands=operands,
            result=result,
            flops=operations * math.prod(sizes.dims[dim] // sizes.degree(axes) for dim, axes in assignment.items()),
            repeated_axes=tuple(a for a, degree in sizes.degrees.items() if degree > 1 and a not in sharding),
        )
        endings: list[tuple[Move, ...]] = [()] if later else reshardings(result, wanted, sizes)
        for ending in endings:
            yield Implementation(steps=(*before, product, *ending), result=result if later else wanted)


def _assignments(
    arrays: tuple[ShardedArray, ShardedArray, ShardedArray], dims: tuple[str, ...], summed: tuple[str, ...]
) -> Iterator[Assignment]:
    """Yield every assignment of the mesh axes to dims.

    An axis may shard no dim, or any of the dims that it shards in the arrays. An axis in the result's `unreduced` may
    also shard any summed dim.

    Args:
        arrays: left operand, right operand and result.
        dims: the dims of the operands.
        summed: the dims that are summed.
    """
    places: dict[str, list[str | None]] = {
        axis: [] for array in arrays for axis in (*array.split_axes, *array.unreduced)
    }
    for axis, options in places.items():
        options += [dim for array in arrays if (dim := array.dim_of(axis)) in dims]
        options += summed if axis in arrays[-1].unreduced else ()
    order = {dim: [axis for array in arrays for axis in array.axes_of(dim)] for dim in dims}
    for choice in itertools.product(*([*dict.fromkeys(options), None] for options in places.values())):
        where = dict(zip(places, choice, strict=True))
        yield {dim: tuple(axis for axis in dict.fromkeys([*order[dim], *places]) if where[axis] == dim) for dim in dims}


def _assigned(array: ShardedArray, assignment: Assignment) -> ShardedArray:
    """Return an operand with the sharding of an assignment."""
    return replace(array, axes=tuple(assignment[dim] for dim in array.dims), unreduced=())


def _sent_bytes(candidate: Implementation, sizes: Sizes) -> Counter[str]:
    """Return the bytes that one device sends over each axis; a collective over several axes counts for each of them."""
    sent: Counter[str] = Counter()
    for step in candidate.communications:
        sent.update(dict.fromkeys(step.axes, _sent(step, sizes)))
    return sent


def _sent(step: Communicate, sizes: Sizes) -> int:
    """Return the bytes that one device sends in a collective."""
    return round(wire_bytes(step.kind, step.bytes, sizes.degree(step.axes)))


def _pareto_optimal(candidates: list[Implementation], sizes: Sizes) -> list[Implementation]:
    """Return the implementations that are Pareto-optimal in flops and in bytes over each axis; one of equal ones."""
    kept: list[tuple[Counter[str], Implementation]] = []
    efforts = [(_sent_bytes(candidate, sizes), candidate) for candidate in candidates]
    for sent, candidate in sorted(efforts, key=lambda effort: (effort[0].total(), effort[1].flops)):
        if not any(w.result == candidate.result and w.flops <= candidate.flops and less <= sent for less, w in kept):
            kept.append((sent, candidate))
    return [candidate for _, candidate in kept]
