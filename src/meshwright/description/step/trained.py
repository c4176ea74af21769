"""Which parameters of a workload train: all, except those frozen by a pattern or because of adapters.

The frozen weights of layers under adapters can be held in fewer bits (QLoRA, arXiv:2305.14314). int8: each column of a
matmul has a scale. nf4: four bits an element and a scale for each block of 64, along a dim that no axis splits only for
storage, so that blocks are never cut and values do not depend on the mesh. Both are split over devices like the weight
itself.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from typing import Literal, NamedTuple

from meshwright.description.step.model import Model
from meshwright.description.step.parameter_tree import IN_USE, STACKED, Parameter, is_adapter, leaves, parameters
from meshwright.description.step.patterns import check_patterns, matches
from meshwright.errors import MeshwrightError

BaseFormat = Literal["int8", "nf4"]

BLOCK = 64
"""Elements of a block of nf4, as in bitsandbytes; fewer if 64 does not divide the dim."""

LEAST_BLOCK = 8
"""The smallest block: below, the scales take as much as an element of int8."""

WHOLE = "norm"
"""A logical axis that is never split, for the dims inside blocks and those of size 1."""


@cache
def frozen_paths(model: Model, patterns: tuple[str, ...]) -> frozenset[str]:
    """Return the paths of frozen parameters: those a pattern matches and, in a model with adapters, all but adapters.

    Patterns are as in `step.patterns`.

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
    """One array of a weight in a format: its declaration and its dtype."""

    parameter: Parameter
    dtype: Literal["int8", "uint8", "bf16", "f32"]


class StoredWeight(NamedTuple):
    """The arrays of a weight in a format."""

    values: StoredArray
    scale: StoredArray


def can_be_quantised(parameter: Parameter) -> bool:
    """Whether a parameter is the weight of a matmul of layers, experts' too; routers are not, and neither are ends."""
    return parameter.is_stacked and parameter.num_inputs > 0 and "router" not in parameter.axes


def stored_weight(parameter: Parameter, base: BaseFormat) -> StoredWeight:
    """Return the arrays of a weight in a format.

    int8: values of the weight's shape, and scales of size 1 along the dims that matmuls sum over. nf4: the blocked dim
    becomes [blocks, block / 2] bytes, of which each holds an element of a block's first half in its low bits and one of
    the second half in its high bits; and scales [blocks, 1].
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
    """Return the dims of a weight that its matmul sums over: they follow those of layers and experts."""
    first = sum(name in (*STACKED, "expert") for name in parameter.axes)
    return tuple(range(first, first + parameter.num_inputs))


def blocked_dim(parameter: Parameter) -> tuple[int, int]:
    """Return the dim along which nf4 has blocks, the last that is not split only in storage, and their size."""
    first = summed_dims(parameter)[0]
    dims = range(first, len(parameter.shape))
    dim = max(dim for dim in dims if parameter.axes[dim] not in IN_USE)
    return dim, math.gcd(BLOCK, parameter.shape[dim])
