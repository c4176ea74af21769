"""Reshard an array: find the collectives and local slices that lead from one sharding to another."""

from __future__ import annotations

import itertools
from dataclasses import replace

from meshwright.description.notation.array import ShardedArray
from meshwright.description.notation.legality import Sizes
from meshwright.description.notation.moves import exchanged, gathered, reduced, scattered, sliced
from meshwright.description.notation.steps import Communicate, LocalSlice
from meshwright.record import Kind

Move = Communicate | LocalSlice


def reshard(
    source: ShardedArray, target: ShardedArray, sizes: Sizes, *, avoid: tuple[Kind, ...] = ()
) -> tuple[Move, ...]:
    """Return the steps from one legal sharding to another of the same dims.

    Slices come first, because they make later arrays smaller, and gathers last, because they make them larger. The
    order is: local slices, reduce-scatters onto dims that need the axis, all-to-alls between dims, all-reduces over
    axes that no dim needs, all-gathers of the remaining axes.

    Args:
        source: the array before.
        target: the array after; it is unreduced over no axis over which `source` is not.
        sizes: the mesh and the sizes of dims.
        avoid: kinds of collectives not to use; reduce-scatter and all-to-all can be avoided.
    """
    moves: list[Move] = []
    current = source
    while not current.has_sharding_of(target):
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
    """Return the steps of each alternative resharding from `source` to `target`, that of `reshard` first.

    The others replace a reduce-scatter by an all-reduce and a slice, an all-to-all by an all-gather and a slice, or an
    all-reduce by a reduce-scatter and an all-gather.
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
    """Return a collective with its bytes."""
    step = Communicate(kind=kind, axes=axes, operand=operand, result=result, bytes=0)
    return replace(step, bytes=sizes.local_bytes(step.counted))


def _slice(current: ShardedArray, target: ShardedArray) -> LocalSlice | None:
    """Return a local slice of the first dim that `target` shards further over unused axes; None without such a dim.

    An axis is unused if it shards no dim of `current`, and `current` is not unreduced over it.
    """
    used = {*current.split_axes, *current.unreduced}
    for dim in target.dims:
        axes = tuple(itertools.takewhile(lambda axis: axis not in used, _missing_axes(current, target, dim)))
        if axes:
            return LocalSlice(axes=axes, operand=current, result=sliced(current, axes, dim))
    return None


def _scatter(current: ShardedArray, target: ShardedArray, sizes: Sizes) -> Communicate | None:
    """Return a reduce-scatter onto the first dim that `target` shards further over unreduced axes; None without one."""
    for dim in target.dims:
        axes = tuple(itertools.takewhile(lambda axis: axis in current.unreduced, _missing_axes(current, target, dim)))
        if axes:
            return communicate("reduce-scatter", axes, current, scattered(current, axes, dim), sizes)
    return None


def _exchange(current: ShardedArray, target: ShardedArray, sizes: Sizes) -> Communicate | None:
    """Return an all-to-all onto the first dim that `target` shards further over another dim's last axes, or None."""
    for dim in target.dims:
        missing = _missing_axes(current, target, dim)
        source = current.dim_of(missing[0]) if missing else None
        held = current.axes_of(source) if source else ()
        for count in range(min(len(missing), len(held)), 0, -1):
            if source and held[-count:] == missing[:count]:
                axes = missing[:count]
                return communicate("all-to-all", axes, current, exchanged(current, axes, source, dim), sizes)
    return None


def _reduce(current: ShardedArray, target: ShardedArray, sizes: Sizes, avoid: tuple[Kind, ...]) -> Communicate | None:
    """Return an all-reduce over the axes that are unreduced now but not in the target; None if there are none.

    Axes that shard a dim of the target are left for a reduce-scatter, unless reduce-scatters are avoided.
    """
    kept = {*target.unreduced} if "reduce-scatter" in avoid else {*target.unreduced, *target.split_axes}
    axes = tuple(axis for axis in current.unreduced if axis not in kept)
    return communicate("all-reduce", axes, current, reduced(current, axes), sizes) if axes else None


def _gather(current: ShardedArray, target: ShardedArray, sizes: Sizes) -> Communicate:
    """Return an all-gather over the excess axes of one dim: the dim where the array grows least.

    Axes that no dim needs are gathered together. An axis that another dim needs is gathered alone, because an
    all-to-all may follow.
    """
    leaving = [axes for dim in target.dims if (axes := _excess_axes(current, target, dim))]
    axes = min(leaving, key=sizes.degree)
    return communicate("all-gather", axes, current, gathered(current, axes), sizes)


def _excess_axes(current: ShardedArray, target: ShardedArray, dim: str) -> tuple[str, ...]:
    """Return the last axes of a dim that must be gathered before the dim can have the target's sharding; () if none.

    They are the last axes that shard no dim of the target. If the very last one shards another dim of the target, it is
    returned alone.
    """
    held = current.axes_of(dim)
    pairs = zip(held, target.axes_of(dim), strict=False)
    num_kept = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
    excess = held[num_kept:]
    unwanted = tuple(itertools.takewhile(lambda axis: axis not in target.split_axes, reversed(excess)))
    return unwanted[::-1] or excess[-1:]


def _missing_axes(current: ShardedArray, target: ShardedArray, dim: str) -> tuple[str, ...]:
    """Return the axes by which the target shards a dim further; () while the dim has excess axes."""
    held, final = current.axes_of(dim), target.axes_of(dim)
    return final[len(held) :] if final[: len(held)] == held else ()


def _halves(move: Move, sizes: Sizes) -> tuple[Move, ...]:
    """Return an all-reduce as two steps, a reduce-scatter and an all-gather; return any other step alone.

    The reduce-scatter shards the first dim whose local size the degrees divide. If there is none, the all-reduce is
    returned alone.
    """
    if isinstance(move, LocalSlice) or move.kind != "all-reduce":
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
    """Return the steps with consecutive all-gathers of the same dim joined into one."""
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
