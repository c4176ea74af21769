"""The parameters of a model, each declared once: count, bytes, shardings and initialisation follow from here."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import TypeVar, Union

from meshwright.workload.config import ModelConfig
from meshwright.workload.declaration import Parameter, Role, Stack

Leaf = TypeVar("Leaf")
Out = TypeVar("Out")
Tree = Mapping[str, Union[Leaf, "Tree[Leaf]"]]
"""Leaves under names, at any depth; as a JAX pytree, a dict."""


@cache
def parameters(model: ModelConfig) -> Tree[Parameter]:
    """The declaration of every parameter of `model`; those of the layers are stacked, dim `layers` first.

    Layers with experts are stacked apart from those with a plain mlp: under `layers` stand the kind that a model is
    made of, under `dense_layers` the plain ones of a model of experts.
    """
    D, V = model.embed, model.vocab
    table_role: Role = "product" if model.tied_embeddings else "table"
    tree: dict[str, Parameter | dict[str, Parameter]] = {
        # Tied, the table is the unembedding too, and has to start as one; the first norm undoes the scale.
        "embedding": Parameter(
            shape=(V, D),
            axes=("vocab", "embed"),
            scale=1 / math.sqrt(D) if model.tied_embeddings else 1.0,
            role=table_role,
        ),
    }
    if model.positions == "learned":
        tree["positions"] = Parameter(shape=(model.max_positions, D), axes=("positions", "embed"), role="table")
    if model.embedding_norm:
        tree |= Stack(model).norm("embedding_norm")
    if model.experts and model.num_dense_layers:
        dense = Stack(model, model.num_dense_layers, "dense_layers")
        tree["dense_layers"] = dense.attention() | dense.mlp()
    stack = Stack(model, model.num_layers - model.num_dense_layers if model.experts else model.num_layers)
    tree["layers"] = stack.attention() | (stack.experts() if model.experts else stack.mlp())
    tree |= Stack(model).norm("final_norm")
    if not model.tied_embeddings:
        tree["unembedding"] = Parameter(shape=(D, V), axes=("embed", "vocab"), scale=1 / math.sqrt(D))
    return tree


def leaves(tree: Tree[Leaf], prefix: str = "") -> Iterator[tuple[str, Leaf]]:
    """Each leaf of a tree with its path: `layers.query`."""
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def map_leaves(function: Callable[[str, Leaf], Out], tree: Tree[Leaf], prefix: str = "") -> Tree[Out]:
    """The tree with `function(path, leaf)` for every leaf."""
    return {
        name: map_leaves(function, value, f"{prefix}{name}.")
        if isinstance(value, Mapping)
        else function(f"{prefix}{name}", value)
        for name, value in tree.items()
    }


def num_parameters(model: ModelConfig) -> int:
    """The number of parameters of `model`."""
    return sum(parameter.size for _, parameter in leaves(parameters(model)))


def num_active_parameters(model: ModelConfig) -> int:
    """The parameters of `model` that work on a token: of its experts, those that a token is sent to."""
    return sum(int(parameter.size * active_share(parameter, model)) for _, parameter in leaves(parameters(model)))


def active_share(parameter: Parameter, model: ModelConfig) -> float:
    """The share of a parameter that works on a token: 1 but for experts, of which some do."""
    if model.experts is None or "expert" not in parameter.axes:
        return 1.0
    return model.experts.num_active / model.experts.count
