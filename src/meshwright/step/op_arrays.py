"""The arrays of a step's ops: their dims as letters, and the axes that split them in use and where they are stored."""

from __future__ import annotations

from typing import NamedTuple

from meshwright.notation import ShardedArray
from meshwright.step.parameters import Parameter

LETTERS = {
    "embed": "D",
    "kv_heads": "K",
    "group": "G",
    "head_dim": "H",
    "mlp": "F",
    "vocab": "V",
    "expert": "E",
    "router": "E",
    "latent": "L",
    "latent_input": "R",
    "positions": "P",
}
"""The dims of parameters as the notation writes them."""

INPUTS = {"D": "X", "R": "latent", "K": "mixed", "F": "hidden"}
"""What a weight is multiplied with, by the first dim that is summed."""

RESULTS = {"D": "Y", "V": "logits"}
"""What comes of a product, by the first dim that it makes; of all others, what the weight is called."""


class Dim(NamedTuple):
    """A dim of an array: its letter, its size, the axes that split it in use and where it is stored."""

    letter: str
    size: int
    used: tuple[str, ...] = ()
    stored: tuple[str, ...] = ()


Dims = tuple[Dim, ...]


def used(name: str, dims: Dims, unreduced: tuple[str, ...] = ()) -> ShardedArray:
    """An array as products have it, or as they leave it: a sum over the axes `unreduced` still to be taken."""
    return ShardedArray(name, tuple(dim.letter for dim in dims), tuple(dim.used for dim in dims), unreduced)


def stored(name: str, dims: Dims) -> ShardedArray:
    """A parameter, or its gradient, as it is stored."""
    return ShardedArray(name, tuple(dim.letter for dim in dims), tuple(dim.stored for dim in dims))


def split_axes(dims: Dims) -> tuple[str, ...]:
    """The axes that split some dims in use: where these dims are summed, over these the sum is still to be taken."""
    return tuple(axis for dim in dims for axis in dim.used)


def inner_and_outer(name: str, parameter: Parameter, dims: Dims) -> tuple[Dims, Dims]:
    """The dims of a weight that its product sums, and those that it makes; that of experts is neither.

    A weight back into the stream sums all but that; a tied table, as rows are looked up in it too, sums its columns.
    """
    dims = dims[1:] if "expert" in parameter.axes else dims
    if name == "embedding":
        return dims[1:], dims[:1]
    return (dims[:-1], dims[-1:]) if parameter.axes[-1] == "embed" else (dims[:1], dims[1:])
