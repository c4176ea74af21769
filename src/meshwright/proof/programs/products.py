"""Matmuls and convolutions by their dims, and what a layout makes each of them communicate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from meshwright.proof.programs.flat import Atoms, Value
from meshwright.proof.programs.layout import Layout
from meshwright.record import Phase


@dataclass(frozen=True)
class Contraction:
    """A matmul or a convolution.

    places: for the left and the right operand, each dim's index in the result; None if it is summed or not in the
    result. inner: the contracting dims. window: for convolutions, the mean number of filter elements applied per
    output pixel. joins: if the result is only added to another matmul's result, the contracting dims of that matmul.
    turns: the number of loop iterations whose results are added up before any other use. rounds: operands are first
    rounded to bfloat16. earlier: for each operand, the earlier matmuls that read the same value, each with the
    number of its operand (0 or 1); a value that one of them gathers is not gathered again.
    """

    phase: Phase
    left: Value
    right: Value
    result: Value
    places: tuple[tuple[int | None, ...], tuple[int | None, ...]]
    inner: Atoms
    dtype: str
    window: float = 1
    joins: Atoms = ()
    turns: int = 1
    rounds: bool = False
    earlier: tuple[tuple[tuple[Contraction, int], ...], ...] = ((), ())


class Moves(NamedTuple):
    """The axes over which a matmul all-gathers each operand, all-reduces and reduce-scatters partial sums."""

    gathered: tuple[tuple[str, ...], ...]
    partial: tuple[str, ...]
    scattered: tuple[str, ...]


def moves(product: Contraction, layout: Layout) -> Moves:
    """Return how a matmul communicates in a layout.

    Over an axis that splits a contracting dim, partial sums are all-reduced if it splits no dim of the result, and
    reduce-scattered if it splits one that no operand has split. An operand is all-gathered over an axis that otherwise
    splits one dim of it and another dim of the result.
    """
    gathered: list[tuple[str, ...]] = [(), ()]
    partial: list[str] = []
    scattered: list[str] = []
    operands = (product.left, product.right)
    for axis in layout.degrees:
        result = _place(layout, product.result, axis)
        own = [_place(layout, value, axis) for value in operands]
        to = [None if place is None else places[place] for place, places in zip(own, product.places, strict=True)]
        summed = [place is not None and kept is None for place, kept in zip(own, to, strict=True)]
        fits = any(kept is not None and kept == result for kept in to)
        if any(summed) and not fits:
            (partial if result is None else scattered).append(axis)
        for number, kept in enumerate(to):
            if (summed[number] and fits) or (kept is not None and kept != result):
                gathered[number] = (*gathered[number], axis)
    return Moves(tuple(gathered), tuple(partial), tuple(scattered))


def _place(layout: Layout, value: Value, axis: str) -> int | None:
    """Return which dim of a value an axis splits; None if it splits none."""
    return next((place for place, axes in enumerate(layout.split(value.dims)) if axis in axes), None)


def product_of(equation: Any, phase: Phase, inputs: Sequence[Value], result: Value) -> Contraction:
    """Return the matmul or convolution of an equation."""
    left, right = inputs[:2]
    name = equation.primitive.name
    dtype, parameters = str(equation.invars[0].aval.dtype), equation.params
    if name == "conv_general_dilated":
        numbers = parameters["dimension_numbers"]
        kept: dict[int, int | None] = dict(zip(numbers.lhs_spec, numbers.out_spec, strict=True))
        places = tuple(None if place == numbers.lhs_spec[1] else kept[place] for place in range(len(left.dims)))
        filters = tuple(
            numbers.out_spec[1] if place == numbers.rhs_spec[0] else None for place in range(len(right.dims))
        )
        inner = (right.dims[numbers.rhs_spec[1]],)
        return Contraction(phase, left, right, result, (places, filters), inner, dtype, _window(equation))
    is_ragged = name == "ragged_dot_general"
    numbers = (
        parameters["ragged_dot_dimension_numbers"].dot_dimension_numbers
        if is_ragged
        else parameters["dimension_numbers"]
    )
    (left_sum, right_sum), (left_batch, right_batch) = numbers
    groups = parameters["ragged_dot_dimension_numbers"].rhs_group_dimensions if is_ragged else ()
    # In the gradient of grouped weights, the dim of groups comes first.
    batch = len(left_batch) + (1 if is_ragged and not groups else 0)
    rows = len(left.dims) - len(left_sum) - len(left_batch)
    places = (
        _places(len(left.dims), left_batch, left_sum, batch),
        _places(len(right.dims), right_batch, (*right_sum, *groups), batch + rows),
    )
    inner = tuple(left.dims[place] for place in left_sum)
    # In this gradient, each row is multiplied for one of the groups only.
    window = 1 / equation.outvars[0].aval.shape[0] if is_ragged and len(result.dims) == 3 else 1
    return Contraction(phase, left, right, result, places, inner, dtype, window)


def _places(count: int, batch: Sequence[int], summed: Sequence[int], start: int) -> tuple[int | None, ...]:
    """Return the index in a matmul's result of each of an operand's `count` dims; None for summed dims.

    batch, summed: the operand's batch and contracting dims. start: the index in the result of its first other dim.
    """
    own = [place for place in range(count) if place not in batch and place not in summed]
    found = {place: start + number for number, place in enumerate(own)}
    found |= {place: number for number, place in enumerate(batch)}
    return tuple(found.get(place) for place in range(count))


def _window(equation: Any) -> float:
    """Return the mean number of filter elements that a convolution applies per output pixel.

    The other elements fall on padding or on the zeros of dilation; XLA's flop count skips these too.
    """
    numbers, parameters = equation.params["dimension_numbers"], equation.params
    image, kernel, out = (var.aval.shape for var in (*equation.invars[:2], equation.outvars[0]))
    places = zip(numbers.lhs_spec[2:], numbers.rhs_spec[2:], numbers.out_spec[2:], strict=True)
    steps = zip(
        parameters["window_strides"], parameters["lhs_dilation"], parameters["rhs_dilation"], parameters["padding"],
        strict=True,
    )  # fmt: skip
    found = 1.0
    for (ours, window, result), (stride, spread, gap, (before, _)) in zip(places, steps, strict=True):
        last = (image[ours] - 1) * spread
        pixels = (place * stride + tap * gap - before for place in range(out[result]) for tap in range(kernel[window]))
        found *= sum(0 <= pixel <= last and pixel % spread == 0 for pixel in pixels) / out[result]
    return found
