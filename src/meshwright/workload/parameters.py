"""The parameters of a model, each declared once: count, bytes, shardings and initialisation follow from here."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, TypeVar, Union

from meshwright.workload.config import ModelConfig

Leaf = TypeVar("Leaf")
Out = TypeVar("Out")
Tree = Mapping[str, Union[Leaf, "Tree[Leaf]"]]
"""Leaves under names, at any depth; as a JAX pytree, a dict."""


@dataclass(frozen=True, kw_only=True)
class Parameter:
    """One array of a model: `axes` names each dim logically, `init` how it starts.

    init: `ones`, or `normal` with standard deviation `scale`.
    """

    shape: tuple[int, ...]
    axes: tuple[str, ...]
    init: Literal["ones", "normal"] = "normal"
    scale: float = 1.0

    def __post_init__(self) -> None:
        assert len(self.shape) == len(self.axes), (self.shape, self.axes)

    @property
    def size(self) -> int:
        """The number of its elements."""
        return math.prod(self.shape)


def parameters(model: ModelConfig) -> Tree[Parameter]:
    """The declaration of every parameter of `model`; those of the layers are stacked, dim `layers` first.

    Query heads stay grouped by the kv head they share, [embed, kv_heads, group, head_dim], so that splitting kv_heads
    splits both alike. Products that add to the residual stream start smaller by sqrt(2 layers), as GPT-2 does it.
    """
    D, F, V = model.embed, model.mlp, model.vocab
    K, G, H = model.num_kv_heads, model.num_groups, model.head_dim
    residual = 1 / math.sqrt(2 * model.num_layers)

    def stacked(shape: tuple[int, ...], axes: tuple[str, ...], fan_in: int, gain: float = 1.0) -> Parameter:
        return Parameter(shape=(model.num_layers, *shape), axes=("layers", *axes), scale=gain / math.sqrt(fan_in))

    def norm(*shape: int) -> Parameter:
        return Parameter(shape=(*shape, D), axes=("layers", "norm")[-len(shape) - 1 :], init="ones")

    head_axes = ("kv_heads", "group", "head_dim")
    tree: dict[str, Parameter | dict[str, Parameter]] = {
        # Tied, the table is the unembedding too, and has to start as one; the first norm undoes the scale.
        "embedding": Parameter(
            shape=(V, D), axes=("vocab", "embed"), scale=1 / math.sqrt(D) if model.tied_embeddings else 1.0
        ),
        "layers": {
            "attention_norm": norm(model.num_layers),
            "query": stacked((D, K, G, H), ("embed", *head_axes), D),
            "key": stacked((D, K, H), ("embed", "kv_heads", "head_dim"), D),
            "value": stacked((D, K, H), ("embed", "kv_heads", "head_dim"), D),
            "output": stacked((K, G, H, D), (*head_axes, "embed"), K * G * H, residual),
            "mlp_norm": norm(model.num_layers),
            "gate": stacked((D, F), ("embed", "mlp"), D),
            "up": stacked((D, F), ("embed", "mlp"), D),
            "down": stacked((F, D), ("mlp", "embed"), F, residual),
        },
        "final_norm": norm(),
    }
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
