"""Return the sharding of an array after a collective or a slice.

A collective can only add or remove the last axes of a dim. In `I_XY` each shard over X is cut again over Y, so a gather
over Y joins neighbouring shards, but a gather over X alone would interleave shards.
"""

from __future__ import annotations

from dataclasses import replace

from meshwright.description.notation.array import ShardedArray
from meshwright.errors import MeshwrightError
from meshwright.record import Kind


def gathered(array: ShardedArray, axes: tuple[str, ...]) -> ShardedArray:
    """Return the array after an all-gather over `axes`, the last axes of one or several dims."""
    _check_on_dims(array, axes, "all-gather")
    return array.with_axes({dim: _without(array, dim, axes) for dim in array.dims})


def reduced(array: ShardedArray, axes: tuple[str, ...]) -> ShardedArray:
    """Return the array after an all-reduce over `axes`."""
    _check_unreduced(array, axes, "all-reduce")
    return replace(array, unreduced=tuple(axis for axis in array.unreduced if axis not in axes))


def scattered(array: ShardedArray, axes: tuple[str, ...], dim: str) -> ShardedArray:
    """Return the array after a reduce-scatter over `axes`, which shards `dim` over them."""
    _check_unreduced(array, axes, "reduce-scatter")
    _check_dim(array, dim)
    return reduced(array, axes).with_axes({dim: array.axes_of(dim) + axes})


def exchanged(array: ShardedArray, axes: tuple[str, ...], source: str, target: str) -> ShardedArray:
    """Return the array after an all-to-all that moves `axes` from the dim `source` to the dim `target`.

    Raises:
        MeshwrightError: `axes` are not the last ones of `source`, or both dims are the same.
    """
    _check_on_dims(array, axes, "all-to-all")
    _check_dim(array, target)
    kept = _without(array, source, axes)
    moving = array.axes_of(source)[len(kept) :]
    if moving != axes or source == target:
        raise MeshwrightError(f"{', '.join(axes)} cannot go from {source} to {target} in {array}")
    return array.with_axes({source: kept, target: array.axes_of(target) + moving})


def sliced(array: ShardedArray, axes: tuple[str, ...], dim: str) -> ShardedArray:
    """Return the array after each device keeps its shard of `dim`, without communication."""
    return array.with_axes({dim: array.axes_of(dim) + axes})


def after(array: ShardedArray, kind: Kind, axes: tuple[str, ...], like: ShardedArray) -> ShardedArray:
    """Return the array after a collective. like: the result that the text states; it determines the dim to shard."""
    if kind == "all-gather":
        return gathered(array, axes)
    if kind == "all-reduce":
        return reduced(array, axes)
    target = like.dim_of(axes[-1])
    if target is None:
        raise MeshwrightError(f"after a {kind} over {', '.join(axes)} a dim is split over {axes[-1]}; {like} has none")
    if kind == "reduce-scatter":
        return scattered(array, axes, target)
    source = array.dim_of(axes[-1])
    if source is None:
        raise MeshwrightError(f"an all-to-all over {axes[-1]} needs a dim split over it; {array} has none")
    return exchanged(array, axes, source, target)


def _without(array: ShardedArray, dim: str, axes: tuple[str, ...]) -> tuple[str, ...]:
    """Return the axes of a dim without its last axes, `axes`. Raises if these are not its last axes."""
    old = array.axes_of(dim)
    kept = tuple(axis for axis in old if axis not in axes)
    if kept != old[: len(kept)]:
        inner = next(index for index, axis in enumerate(old) if axis in axes)
        raise MeshwrightError(
            f"{', '.join(axes)} cannot leave {dim} of {array} before the axes inside it; take {', '.join(old[inner:])}"
        )
    return kept


def _check_on_dims(array: ShardedArray, axes: tuple[str, ...], kind: str) -> None:
    for axis in axes:
        if array.dim_of(axis) is None:
            raise MeshwrightError(f"an {kind} over {axis} needs a dim split over {axis}; {array} has none")


def _check_unreduced(array: ShardedArray, axes: tuple[str, ...], kind: str) -> None:
    for axis in axes:
        if axis not in array.unreduced:
            raise MeshwrightError(
                f"{array} has no sum over {axis} for a {kind} to take; it would be marked {{U_{axis}}}"
            )


def _check_dim(array: ShardedArray, dim: str) -> None:
    if dim not in array.dims:
        raise MeshwrightError(f"{array} has no dim {dim}; its dims are {', '.join(array.dims)}")
