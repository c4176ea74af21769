"""Which parameters of a workload train: all, except those frozen by a pattern or because of adapters.

The frozen weights of layers under adapters can be stored in fewer bits (QLoRA, arXiv:2305.14314). int8: each column of
a matmul has a scale. nf4: an element has four bits, and each block of 64 elements has a scale. Blocks are along a dim
with the same sharding in storage and in use, so that they are never cut and values do not depend on the mesh. Values
and scales are split over devices like the weight itself.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from typing import Literal, NamedTuple

from meshwright.description.step.model import Model
from meshwright.description.step.parameter_tree import (
    IN_USE,
    STACKED,
    Parameter,
    check_patterns,
    is_adapter,
    leaves,
    matches,
    parameters,
)
from meshwright.errors import MeshwrightError

BaseFormat = Literal["int8", "nf4"]

BLOCK = 64
"""Elements in a block of nf4, as in bitsandbytes; fewer if 64 does not divide the dim."""

LEAST_BLOCK = 8
"""The smallest block: in smaller ones, values and scales take as much memory as int8."""

WHOLE = "norm"
"""A logical axis that is never split; dims inside blocks and dims of size 1 have it."""


@cache
def frozen_paths(model: Model, patterns: tuple[str, ...]) -> frozenset[str]:
    """Return the paths of frozen parameters: those a pattern matches and, in a model with adapters, all but adapters.

    Patterns are as in `step.parameter_tree.matches`.

    Raises:
        MeshwrightError: a pattern matches nothing, or the patterns leave nothing to train.
    """
    paths = tuple(path for path, _ in leaves(parameters(model)))
    has_adapters = any(map(is_adapter, paths))
    frozen = {path for path in paths if has_adapters and not is_adapter(path)}
    check_patterns("freeze", patterns, paths)
    frozen |= {path for path in paths if any(matches(pattern, path) for pattern in patterns)}
    if frozen.issuperset(paths):
        raise MeshwrightError(
            f"freeze {', '.join(map(repr, patterns))} leaves no parameter of {model.name} to train; leave one out"
        )
    return frozenset(frozen)


class StoredArray(NamedTuple):
    """One array of a quantised weight: its declaration and its dtype."""

    parameter: Parameter
    dtype: Literal["int8", "uint8", "bf16", "f32"]


class StoredWeight(NamedTuple):
    """The arrays of a quantised weight."""

    values: StoredArray
    scale: StoredArray


def can_be_quantised(parameter: Parameter) -> bool:
    """Whether a parameter can be stored in a `BaseFormat`: weights of matmuls in layers can, except routers."""
    return parameter.is_stacked and parameter.num_inputs > 0 and "router" not in parameter.axes


def stored_weight(parameter: Parameter, base: BaseFormat) -> StoredWeight:
    """Return the arrays in which a weight is stored in a format.

    int8: values have the weight's shape, and scales have size 1 along the dims that the matmul sums over. nf4: in the
    values, the blocked dim becomes [blocks, block / 2] bytes; each byte holds an element of the block's first half in
    its low bits and one of the second half in its high bits. In the scales it becomes [blocks, 1].
    """
    if base == "int8":
        summed = summed_dims(parameter)
        shape = tuple(1 if dim in summed else size for dim, size in enumerate(parameter.shape))
        axes = tuple(WHOLE if dim in summed else name for dim, name in enumerate(parameter.axes))
        return StoredWeight(
            StoredArray(parameter, "int8"), StoredArray(replace(parameter, shape=shape, axes=axes), "f32")
        )
    dim, block = blocked_dim(parameter)

    def blocked(size: int) -> Parameter:
        own = (parameter.shape[dim] // block, size)
        return replace(
            parameter,
            shape=(*parameter.shape[:dim], *own, *parameter.shape[dim + 1 :]),
            axes=(*parameter.axes[: dim + 1], WHOLE, *parameter.axes[dim + 1 :]),
        )

    return StoredWeight(StoredArray(blocked(block // 2), "uint8"), StoredArray(blocked(1), "bf16"))


def summed_dims(parameter: Parameter) -> tuple[int, ...]:
    """Return the indices of the dims that a weight's matmul sums over; they follow the dims of layers and experts."""
    first = sum(name in (*STACKED, "expert") for name in parameter.axes)
    return tuple(range(first, first + parameter.num_inputs))


def blocked_dim(parameter: Parameter) -> tuple[int, int]:
    """Return the index of the dim that nf4 cuts into blocks, and the elements of a block.

    It is the last dim with the same sharding in storage and in use (not in `IN_USE`).
    """
    first = summed_dims(parameter)[0]
    dims = range(first, len(parameter.shape))
    dim = max(dim for dim in dims if parameter.axes[dim] not in IN_USE)
    return dim, math.gcd(BLOCK, parameter.shape[dim])
