"""Optimizer pass: the collectives of the parameter update. `planning.cost.model_states` has the optimizer's state.

The gradient norm is a sum over the axes that split each parameter; Adafactor (arXiv:1804.04235) also averages rows,
columns and whole arrays.
"""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.description.step.ir import Array, Communicate, Dim, Region

FACTORED_FROM = 128
"""Smallest size of the two largest dims from which Optax factors a second moment (`optax.scale_by_factored_rms`)."""

_SCALARS_OF_ADAFACTOR = 3
"""Number of means of squares of a whole array: one of the update and two of the parameter (`optax.adafactor`)."""


def factored_dims(shape: tuple[int, ...]) -> tuple[int, int] | None:
    """Return the indices of the second largest and the largest dim of a parameter; None if it is not factored.

    Adafactor averages squares over each of these dims. Of equal dims the later one counts as larger.
    """
    by_size = sorted(range(len(shape)), key=shape.__getitem__)
    if len(shape) < 2 or shape[by_size[-2]] < FACTORED_FROM:
        return None
    return by_size[-2], by_size[-1]


def update_moves(path: str, dims: tuple[Dim, ...], *, is_adafactor: bool) -> Iterator[Communicate]:
    """Yield the all-reduces in the update of a parameter.

    The gradient norm needs one for each split dim, over the dim's axes. Adafactor adds all-reduces of its means.

    dims: the parameter's dims in storage.
    """
    scalar = Array("scalar", (), width="float32")
    for dim in dims:
        if dim.axes:
            yield _sum(f"norm of the gradient of {path}", dim.axes, scalar)
    if not is_adafactor:
        return
    for dim in dims:
        if dim.axes:
            yield _sum(f"sizes of {path} and its update", dim.axes, scalar, times=_SCALARS_OF_ADAFACTOR)
    if factored := factored_dims(tuple(dim.size or 0 for dim in dims)):
        second, first = factored
        rows, columns = (tuple(d for at, d in enumerate(dims) if at != gone) for gone in (first, second))
        both = tuple(d for at, d in enumerate(dims) if at not in factored)
        for name, axes, kept in (
            (f"means of rows of {path}", dims[first].axes, rows),
            (f"means of columns of {path}", dims[second].axes, columns),
            (f"mean of means of rows of {path}", dims[second].axes, both),
        ):
            if axes:
                yield _sum(name, axes, Array("means", kept, width="float32"))


def sum_of_copies(path: str, dims: tuple[Dim, ...], index: int, copies: int) -> Communicate:
    """Return the all-reduce of the gradients of copied kv heads.

    Args:
        path: the parameter's path.
        dims: the dims of the parameter with all copies.
        index: the index of the dim of kv heads.
        copies: the number of copies of each head.
    """
    heads = Dim("N", (dims[index].size or 0) // copies)
    array = Array("gradient", (*dims[:index], heads, *dims[index + 1 :]), width="float32")
    return _sum(f"gradient of the copies of {path}", dims[index].axes, array)


def _sum(name: str, axes: tuple[str, ...], array: Array, times: int = 1) -> Communicate:
    """Return an all-reduce of `array` over `axes` in the optimizer's update. times: how often a step runs it."""
    return Communicate(
        name=name,
        kind="all-reduce",
        axes=axes,
        phase="update",
        region=Region("update"),
        array=array,
        times=times,
        of_weight=True,
    )
