"""From one sharding of an array to another: the collectives and free slices that lead there."""

from __future__ import annotations

import itertools
from dataclasses import replace

from meshwright.notation.array import ShardedArray
from meshwright.notation.legality import Sizes
from meshwright.notation.moves import exchanged, gathered, reduced, scattered, sliced
from meshwright.notation.steps import Communicate, Slice
from meshwright.record import Kind

Move = Communicate | Slice


def reshard(
    source: ShardedArray, target: ShardedArray, sizes: Sizes, *, avoid: tuple[Kind, ...] = ()
) -> tuple[Move, ...]:
    """The steps from one legal sharding to another of the same dims; `target` may be unreduced only where `source` is.

    Slices come first, because they make everything after them smaller, and gathers last, because they make it larger:
    a free slice, a reduce-scatter onto a dim that wants the axis, an all-to-all between dims, an all-reduce of what no
    dim wants, an all-gather of what stands in the way. Kinds in `avoid` (reduce-scatter, all-to-all) are gone around.
    """
    moves: list[Move] = []
    current = source
    while not current.lies_like(target):
        move = (
            _slice(current, target)
            or ("reduce-scatter" not in avoid and _scatter(current, target, sizes))
            or ("all-to-all" not in avoid and _exchange(current, target, sizes))
            or _reduce(current, target, sizes, avoid)
            or _gather(current, target, sizes)
        )
        current = move.result
        moves.append(move)
    return _joined(moves)


def reshardings(source: ShardedArray, target: ShardedArray, sizes: Sizes) -> list[tuple[Move, ...]]:
    """Every way worth pricing, the direct one first.

    The others do an all-reduce and a slice for a reduce-scatter, a gather and a slice for an all-to-all, or an
    all-reduce in its halves: a reduce-scatter now and an all-gather that can wait.
    """
    direct = reshard(source, target, sizes)
    kinds = {move.kind for move in direct if isinstance(move, Communicate)}
    around: tuple[Kind, ...] = ("reduce-scatter", "all-to-all")
    others = [reshard(source, target, sizes, avoid=(kind,)) for kind in around if kind in kinds]
    halves = tuple(itertools.chain.from_iterable(_halves(move, sizes) for move in direct))
    return list(dict.fromkeys([direct, *others, halves]))


def communicate(
    kind: Kind, axes: tuple[str, ...], operand: ShardedArray, result: ShardedArray, sizes: Sizes
) -> Communicate:
    """A collective with its bytes."""
    step = Communicate(kind=kind, axes=axes, operand=operand, result=result, bytes=0)
    return replace(step, bytes=sizes.local_bytes(step.counted))


def _slice(current: ShardedArray, target: ShardedArray) -> Slice | None:
    """Cut a dim over the axes that come next on it and are used nowhere yet."""
    used = {*current.split_axes, *current.unreduced}
    for dim in target.dims:
        axes = tuple(itertools.takewhile(lambda axis: axis not in used, _wanted(current, target, dim)))
        if axes:
            return Slice(axes=axes, operand=current, result=sliced(current, axes, dim))
    return None


def _scatter(current: ShardedArray, target: ShardedArray, sizes: Sizes) -> Communicate | None:
    """Reduce-scatter over the axes that come next on a dim and are still a sum."""
    for dim in target.dims:
        axes = tuple(itertools.takewhile(lambda axis: axis in current.unreduced, _wanted(current, target, dim)))
        if axes:
            return communicate("reduce-scatter", axes, current, scattered(current, axes, dim), sizes)
    return None


def _exchange(current: ShardedArray, target: ShardedArray, sizes: Sizes) -> Communicate | None:
    """All-to-all over the axes that come next on a dim and are the last of another."""
    for dim in target.dims:
        wanted = _wanted(current, target, dim)
        source = current.dim_of(wanted[0]) if wanted else None
        held = current.axes_of(source) if source else ()
        for count in range(min(len(wanted), len(held)), 0, -1):
            if source and held[-count:] == wanted[:count]:
                axes = wanted[:count]
                return communicate("all-to-all", axes, current, exchanged(current, axes, source, dim), sizes)
    return None


def _reduce(current: ShardedArray, target: ShardedArray, sizes: Sizes, avoid: tuple[Kind, ...]) -> Communicate | None:
    """All-reduce what is not to stay a sum and will not be scattered onto a dim."""
    kept = {*target.unreduced} if "reduce-scatter" in avoid else {*target.unreduced, *target.split_axes}
    axes = tuple(axis for axis in current.unreduced if axis not in kept)
    return communicate("all-reduce", axes, current, reduced(current, axes), sizes) if axes else None


def _gather(current: ShardedArray, target: ShardedArray, sizes: Sizes) -> Communicate:
    """All-gather the axes at the end of a dim that must leave it: on the dim where that makes the least of it.

    Axes that no dim wants go together; one that another dim wants goes alone, since it may make an all-to-all possible.
    """
    leaving = [axes for dim in target.dims if (axes := _in_the_way(current, target, dim))]
    axes = min(leaving, key=sizes.degree)
    return communicate("all-gather", axes, current, gathered(current, axes), sizes)


def _in_the_way(current: ShardedArray, target: ShardedArray, dim: str) -> tuple[str, ...]:
    """The last axes of a dim that must leave it."""
    held = current.axes_of(dim)
    excess = held[len(_common(held, target.axes_of(dim))) :]
    unwanted = tuple(itertools.takewhile(lambda axis: axis not in target.split_axes, reversed(excess)))
    return unwanted[::-1] or excess[-1:]


def _wanted(current: ShardedArray, target: ShardedArray, dim: str) -> tuple[str, ...]:
    """The axes that a dim still lacks; none while others stand in their way."""
    held, final = current.axes_of(dim), target.axes_of(dim)
    return final[len(held) :] if final[: len(held)] == held else ()


def _common(left: tuple[str, ...], right: tuple[str, ...]) -> tuple[str, ...]:
    """The axes that both begin with."""
    pairs = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(left, right, strict=False))
    return tuple(axis for axis, _ in pairs)


def _halves(move: Move, sizes: Sizes) -> tuple[Move, ...]:
    """An all-reduce as a reduce-scatter onto the first dim that divides and an all-gather; any other move as it is."""
    if isinstance(move, Slice) or move.kind != "all-reduce":
        return (move,)
    for dim in move.operand.dims:
        if sizes.local_size(move.operand, dim) % sizes.degree(move.axes) == 0:
            middle = scattered(move.operand, move.axes, dim)
            return (
                communicate("reduce-scatter", move.axes, move.operand, middle, sizes),
                communicate("all-gather", move.axes, middle, move.result, sizes),
            )
    return (move,)


def _joined(moves: list[Move]) -> tuple[Move, ...]:
    """The moves with neighbouring all-gathers of one dim made one: first the inner axes left, then the outer."""
    joined: list[Move] = []
    for move in moves:
        last = joined[-1] if joined else None
        if (
            isinstance(last, Communicate)
            and isinstance(move, Communicate)
            and last.kind == move.kind == "all-gather"
            and last.source == move.source
        ):
            joined[-1] = replace(move, axes=move.axes + last.axes, operand=last.operand)
        else:
            joined.append(move)
    return tuple(joined)
