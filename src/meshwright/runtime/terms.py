"""How arrays of the notation lie on a JAX mesh; a sum still to be taken as its terms, in dims of their own.

`C[I, K]{U_X}` is in explicit and manual mode a type. Where there is no such type (auto mode, the arrays handed to a
program) the array has one more dim in front for each axis that it is a sum over, split over that axis: [X, I, K].
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from string import ascii_uppercase
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import PartitionSpec as P

from meshwright.notation import Communicate, Multiply, ShardedArray, Sizes, Slice

Shape = tuple[int, ...]
Move = Communicate | Slice
Lay = Callable[[Array, Shape, P], Array]
"""Gives a value another shape and says in which spec it then lies."""


def spec(array: ShardedArray) -> P:
    """How an array lies, a sum still to be taken as a type."""
    return P(*(axes or None for axes in array.axes), unreduced=frozenset(array.unreduced))


def spec_of_terms(array: ShardedArray) -> P:
    """How an array lies with the terms of its sum in dims of their own."""
    return P(*term_axes(array), *(axes or None for axes in array.axes))


def shape_of_terms(array: ShardedArray, sizes: Sizes) -> Shape:
    """The global shape of an array with the terms of its sum in dims of their own."""
    return tuple([sizes.degrees[axis] for axis in term_axes(array)] + [sizes.dims[dim] for dim in array.dims])


def term_axes(array: ShardedArray) -> tuple[str, ...]:
    """The axes of the dims that hold an array's terms; their order says nothing, so it is that of the alphabet."""
    return tuple(sorted(array.unreduced))


def term_dims(array: ShardedArray) -> tuple[int, ...]:
    """The positions of the dims that hold an array's terms."""
    return tuple(range(len(array.unreduced)))


def as_terms(value: Any, array: ShardedArray, sizes: Sizes) -> np.ndarray:
    """A value as terms that add up to it: the first is the whole of it, the others are zero."""
    value = np.asarray(value)
    terms = np.zeros(shape_of_terms(array, sizes), value.dtype)
    terms[(0,) * len(array.unreduced)] = value
    return terms


def product_of_terms(step: Multiply, left: Array, right: Array, *, degrees: Mapping[str, int], lay: Lay) -> Array:
    """A product with the terms of the sum that it leaves in dims of their own.

    A dim summed over mesh axes is reshaped into those axes and the rest, which changes no device's part; the axes then
    are batch dims of the einsum. lay: gives a value another shape, and the spec in which it lies as before.
    """
    axes = term_axes(step.result)
    letters = dict(zip(axes, reversed(ascii_uppercase), strict=False))
    inputs, _, output = step.formula.partition("->")
    formulas, values = [], []
    for formula, value, array in zip(inputs.split(","), (left, right), step.operands, strict=True):
        text, shape, parts = "", [], []
        for letter, size, held in zip(formula, value.shape, array.axes, strict=True):
            own = [axis for axis in held if axis in axes]
            rest = tuple(axis for axis in held if axis not in axes)
            split = [degrees[axis] for axis in own]
            text += "".join(letters[axis] for axis in own) + letter
            shape += [*split, size // int(np.prod(split, dtype=int))]
            parts += [*own, rest or None]
        formulas.append(text)
        values.append(lay(value, tuple(shape), P(*parts)))
    return jnp.einsum(f"{','.join(formulas)}->{''.join(letters[axis] for axis in axes)}{output}", *values)


def sum_of_terms(step: Move, value: Array, *, lay: Lay) -> Array:
    """A value with those of its terms added up that a step takes the sum of.

    They are first made one dim: of a sum over several the partitioner makes an all-reduce for each (JAX 0.10.2).
    """
    axes = term_axes(step.operand)
    taken = tuple(axis for axis in axes if axis not in step.result.unreduced)
    if not taken:
        return value
    kept = tuple(axis for axis in axes if axis not in taken)
    value = jnp.moveaxis(value, [axes.index(axis) for axis in taken], range(len(taken)))
    shape = (-1, *value.shape[len(taken) :])
    parts = (taken, *kept, *(held or None for held in step.operand.axes))
    return lay(value, shape, P(*parts)).sum(0)
