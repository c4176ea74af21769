"""Arrays of the notation on a JAX mesh, with unreduced arrays stored as partial sums ("terms") where types lack them.

An array that is unreduced over axis X, `C[I, K]{U_X}`, is a JAX type in explicit and manual mode. In auto mode and for
arguments of a program there is no such type, so the array has one leading dim of terms for each unreduced axis, sharded
over that axis: [X, I, K]. The array is the sum of its terms.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from string import ascii_uppercase
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import PartitionSpec as P

from meshwright.description.notation.array import ShardedArray
from meshwright.description.notation.legality import Sizes
from meshwright.description.notation.steps import Communicate, LocalSlice, Multiply

Shape = tuple[int, ...]
Move = Communicate | LocalSlice
ReshapeTo = Callable[[Array, Shape, P], Array]
"""A function (value, shape, spec) that reshapes a value and sets the spec of the result."""


def spec(array: ShardedArray) -> P:
    """Return the PartitionSpec of an array, with unreduced axes as part of the type."""
    return P(*(axes or None for axes in array.axes), unreduced=frozenset(array.unreduced))


def spec_of_terms(array: ShardedArray) -> P:
    """Return the PartitionSpec of an array with partial sums along leading dims, one for each unreduced axis."""
    return P(*term_axes(array), *(axes or None for axes in array.axes))


def shape_of_terms(array: ShardedArray, sizes: Sizes) -> Shape:
    """Return the global shape of an array with its leading dims of terms."""
    return tuple([sizes.degrees[axis] for axis in term_axes(array)] + [sizes.dims[dim] for dim in array.dims])


def term_axes(array: ShardedArray) -> tuple[str, ...]:
    """Return the mesh axes of an array's leading dims of terms, in alphabetical order."""
    return tuple(sorted(array.unreduced))


def term_dims(array: ShardedArray) -> tuple[int, ...]:
    """Return the indices of an array's leading dims of terms."""
    return tuple(range(len(array.unreduced)))


def as_terms(value: Any, array: ShardedArray, sizes: Sizes) -> np.ndarray:
    """Return `value` stored as terms along leading dims: the first term is the value, the others are zero."""
    value = np.asarray(value)
    terms = np.zeros(shape_of_terms(array, sizes), value.dtype)
    terms[(0,) * len(array.unreduced)] = value
    return terms


def product_of_terms(
    step: Multiply, left: Array, right: Array, *, degrees: Mapping[str, int], reshape_to: ReshapeTo
) -> Array:
    """Return the result of a matmul, with one leading dim of terms for each mesh axis that it is unreduced over.

    A summed dim that is split over mesh axes is reshaped to these axes and the rest, without communication; the axes
    are then batch dims of the einsum.

    degrees: degree of each mesh axis.
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
        values.append(reshape_to(value, tuple(shape), P(*parts)))
    return jnp.einsum(f"{','.join(formulas)}->{''.join(letters[axis] for axis in axes)}{output}", *values)


def sum_of_terms(step: Move, value: Array, *, reshape_to: ReshapeTo) -> Array:
    """Return a value with the terms summed over the mesh axes that a step reduces.

    These leading dims are merged into one first: for a sum over several dims, the partitioner emits one all-reduce per
    dim (JAX 0.10.2).
    """
    axes = term_axes(step.operand)
    taken = tuple(axis for axis in axes if axis not in step.result.unreduced)
    if not taken:
        return value
    kept = tuple(axis for axis in axes if axis not in taken)
    value = jnp.moveaxis(value, [axes.index(axis) for axis in taken], range(len(taken)))
    shape = (-1, *value.shape[len(taken) :])
    parts = (taken, *kept, *(held or None for held in step.operand.axes))
    return reshape_to(value, shape, P(*parts)).sum(0)
