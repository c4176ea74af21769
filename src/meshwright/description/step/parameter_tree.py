"""The declarations of a model's parameters, from which counts, bytes, shardings and initialisation are derived."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cache
from typing import TYPE_CHECKING, Literal, TypeVar, Union

from meshwright.description.step.blocks import program
from meshwright.description.step.layer import (
    HEADS,
    LINEAR_HEADS,
    Add,
    Attention,
    Dims,
    Dispatch,
    EndOp,
    GatedDelta,
    LayerOp,
    Linear,
    Lookup,
    LowRank,
    Mix,
    Norm,
    vector_dims,
)
from meshwright.description.step.model import Model
from meshwright.errors import MeshwrightError, did_you_mean

if TYPE_CHECKING:
    from typing_extensions import TypeIs

Role = Literal["product", "table", "vector"]

STACKED = ("layers", "dense_layers")
"""Logical axes of the stacked dim: of a model's main layers, and of dense layers before MoE layers."""

CHOICE_BIAS = "choice_bias"
"""Name of the parameter added to a router's scores only to choose experts (`Routing`). It has no gradient."""

EXPERT_SCALE = "expert_scale"
"""Name of the parameter that multiplies the weight of each expert's output (`Routing`)."""

ALTUP_SCALE = "altup_scale"
LAYER_SCALE = "layer_scale"
"""Name of the parameter by which the stream is multiplied after a layer (`Add`). It has no gradient."""

SINKS = "sinks"
"""Name of the parameter with attention sinks: logits that take a share of each head's softmax (`Attention`)."""

DECAY_LOG, DECAY_BIAS = "decay_log", "decay_bias"
"""Names of the parameters that give the decay of linear attention (`GatedDelta`)."""

LORA_A, LORA_B, LORA_M = "_lora_a", "_lora_b", "_lora_m"
"""Suffixes of the names of a low-rank branch's two weights, and of its magnitudes (`LowRank`)."""

RANK, SLOT = "rank", "adapter"
"""The logical axes of the inner dims of a low-rank branch; they are never split."""

IN_USE = {"embed": "activation", "latent_input": "activation"}
"""Logical axes along which a parameter is sharded only in storage, and the logical axis that replaces each in use."""

Leaf = TypeVar("Leaf")
Out = TypeVar("Out")
Tree = Mapping[str, Union[Leaf, "Tree[Leaf]"]]
"""Nested mappings from names to leaves, at any depth; as a JAX pytree, a dict."""


@dataclass(frozen=True, kw_only=True)
class Parameter:
    """The declaration of one parameter array of a model."""

    shape: tuple[int, ...]
    axes: tuple[str, ...]  # Logical axis of each dim.
    # Initial values: ones, normal with standard deviation `scale`, uniform in [-scale, scale], or the logarithm of a
    # number that is uniform in (0, scale].
    init: Literal["ones", "normal", "uniform", "log uniform"] = "normal"
    scale: float = 1.0
    # `product`: a matmul's operand. `table`: rows to look up. `vector`: added to activations or multiplied with them.
    role: Role = "product"
    # Number of input dims of a layer's weight, after those of layers and experts; the rest are outputs.
    num_inputs: int = 0

    def __post_init__(self) -> None:
        assert len(self.shape) == len(self.axes), (self.shape, self.axes)

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def num_layers(self) -> int:
        """Number of layers over which the parameter is stacked; 1 for a parameter outside the layers."""
        return self.shape[0] if self.is_stacked else 1

    @property
    def is_stacked(self) -> bool:
        """Whether the parameter belongs to layers and is stacked over them."""
        return self.axes[0] in STACKED


@cache
def parameters(model: Model) -> Tree[Parameter]:
    """Return the declaration of every parameter of `model`, stacked over the layers of a stack.

    Parameters of layers are under the name of their stack: `layers`, or `dense_layers` for the dense layers before MoE
    layers. If layers of several kinds alternate in a cycle, there is a stack for each position in the cycle:
    `layers_0`, `layers_1` and so on. Parameters outside the layers are at the top.
    """
    tree: dict[str, Parameter | dict[str, Parameter]] = {}
    ops = program(model)
    for op in (*ops.embedding, *ops.layer_inputs, *ops.widening, *ops.narrowing):
        tree |= declared(op)
    for stack in ops.stacks:
        axis = stack.name if stack.name in STACKED else "layers"
        of_layer = {name: parameter for op in stack.ops for name, parameter in declared(op).items()}
        tree[stack.name] = {
            name: replace(p, shape=(stack.num_layers, *p.shape), axes=(axis, *p.axes)) for name, p in of_layer.items()
        }
    for op in ops.logits:
        tree |= declared(op)
    return tree


def declared(op: LayerOp | EndOp) -> dict[str, Parameter]:
    """Return the parameters that one op declares, for one layer, by name; most ops declare none."""
    match op:
        case Norm() if op.has_scale:
            axes, shape = zip(*(op.dims or (("norm", op.size),)), strict=True)
            scale = Parameter(shape=shape, axes=axes, init="ones", role="vector")
            if op.offset:
                scale = replace(scale, init="normal", scale=0.0)
            bias = replace(scale, init="normal", scale=0.0)
            return {op.name: scale} | ({f"{op.name}_bias": bias} if op.has_bias else {})
        case Linear():
            return ({} if op.is_tied else _weight(op)) | _branch(op.branch, op.low_rank, op.inputs, op.outputs)
        case Dispatch():
            bias = Parameter(shape=(op.num_experts,), axes=("router",), scale=0.0, role="vector")
            found = {CHOICE_BIAS: bias} if op.routing.has_choice_bias else {}
            return found | ({EXPERT_SCALE: replace(bias, init="ones")} if op.routing.has_expert_scale else {})
        case Add() if op.has_layer_scale:
            return {LAYER_SCALE: Parameter(shape=(1,), axes=("norm",), init="ones", role="vector")}
        case Mix() if op.kind != "add":
            count = op.num_streams
            shape = (count**2 if op.kind == "predict" else count, count)
            mixing = Parameter(shape=shape, axes=("norm", "router"), scale=1 / count, role="vector", num_inputs=1)
            scale = Parameter(shape=(op.size,), axes=("norm",), init="ones", role="vector")
            return {f"altup_{op.kind}": mixing} | ({ALTUP_SCALE: scale} if op.kind == "correct" else {})
        case Attention() if op.has_sinks:
            shape = (op.num_kv_heads, op.num_heads // op.num_kv_heads)
            return {SINKS: Parameter(shape=shape, axes=HEADS[:2], scale=0.0, role="vector")}
        case GatedDelta():
            found = {name: _channels(op.taps, dims) for name, _, dims in op.convolved}
            heads, group = (op.num_heads, op.group), (LINEAR_HEADS, "group")
            # Decays and their bias start as in Mamba-2 (arXiv:2405.21060).
            decay = Parameter(shape=heads, axes=group, init="log uniform", scale=16.0, role="vector")
            return found | {DECAY_LOG: decay, DECAY_BIAS: replace(decay, init="ones")}
        case Lookup():
            (rows, num_rows), (columns, num_columns) = op.rows, op.columns
            shape, role = (num_rows, num_columns), "product" if op.is_tied else "table"
            table = Parameter(shape=shape, axes=(rows, columns), scale=op.init_scale, role=role)
            return {op.name: table} | _branch(op.name, op.low_rank, (op.rows,), (op.columns,), is_table=True)
        case _:
            return {}


def _channels(taps: int, dims: Dims) -> Parameter:
    """Declare the weights of a convolution along the sequence, one per tap and channel."""
    axes, shape = zip(*dims, strict=True)
    scale = 1 / math.sqrt(taps)
    return Parameter(shape=(taps, *shape), axes=("taps", *axes), scale=scale, role="vector", num_inputs=1)


def _weight(op: Linear) -> dict[str, Parameter]:
    """Declare the weight of a matmul, and its bias if it has one."""
    experts = (("expert", op.num_experts),) if op.num_experts else ()
    dims = (*experts, *op.inputs, *op.outputs)
    axes, shape = tuple(name for name, _ in dims), tuple(size for _, size in dims)
    scale = op.init_scale if op.init_scale is not None else 1 / math.sqrt(op.fan_in)
    found = {op.name: Parameter(shape=shape, axes=axes, scale=scale, num_inputs=len(op.inputs))}
    if op.has_bias:
        names, sizes = tuple(name for name, _ in op.bias_dims), tuple(size for _, size in op.bias_dims)
        found[f"{op.name}_bias"] = Parameter(shape=sizes, axes=names, scale=0.0, role="vector")
    return found


def _branch(
    name: str, branch: LowRank | None, inputs: Dims, outputs: Dims, *, is_table: bool = False
) -> dict[str, Parameter]:
    """Declare the weights of a low-rank branch, if there is one.

    Initialised as in PEFT. Beside a matmul, A is kaiming_uniform_ with a = sqrt(5), which is uniform within
    1 / sqrt(fan in), and B is zero. Beside a table (`is_table`), A is zero and B is standard normal.
    """
    if branch is None:
        return {}
    (axes_a, shape_a), (axes_b, shape_b) = (
        zip(*dims, strict=True) for dims in ((*inputs, *branch.dims), (*branch.dims, *outputs))
    )
    if is_table:
        a = Parameter(shape=shape_a, axes=axes_a, scale=0.0, role="table")
        b = Parameter(shape=shape_b, axes=axes_b)
    else:
        fan_in = math.prod(size for _, size in inputs)
        a = Parameter(shape=shape_a, axes=axes_a, init="uniform", scale=1 / math.sqrt(fan_in))
        b = Parameter(shape=shape_b, axes=axes_b, init="uniform", scale=0.0)
    found = {f"{name}{LORA_A}": a, f"{name}{LORA_B}": b}
    if branch.has_magnitude:
        # Training replaces these initial values by the norms of W's columns (`models.adapters.first_magnitudes`).
        names, sizes = zip(*vector_dims(outputs), strict=True)
        found[f"{name}{LORA_M}"] = Parameter(shape=sizes, axes=names, init="ones", role="vector")
    return found


def is_adapter(path: str) -> bool:
    """Whether a path is that of a LoRA parameter."""
    return path.endswith((LORA_A, LORA_B, LORA_M))


def _is_tree(value: Leaf | Tree[Leaf]) -> TypeIs[Tree[Leaf]]:
    """Whether a value is a subtree; leaves are never mappings."""
    return isinstance(value, Mapping)


def leaves(tree: Tree[Leaf], prefix: str = "") -> Iterator[tuple[str, Leaf]]:
    """Yield (path, leaf) for each leaf of a tree; a path is `prefix`, then names joined by dots: `layers.query`."""
    for name, value in tree.items():
        if _is_tree(value):
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def map_leaves(function: Callable[[str, Leaf], Out], tree: Tree[Leaf], prefix: str = "") -> Tree[Out]:
    """Return the tree with every leaf replaced by `function(path, leaf)`. prefix: as in `leaves`."""
    return {
        name: map_leaves(function, value, f"{prefix}{name}.") if _is_tree(value) else function(f"{prefix}{name}", value)
        for name, value in tree.items()
    }


def drop_paths(tree: Tree[Leaf], paths: Collection[str], prefix: str = "") -> Tree[Leaf]:
    """Return a tree without the leaves at `paths`, and without empty subtrees. prefix: as in `leaves`."""
    found: dict[str, Leaf | Tree[Leaf]] = {}
    for name, value in tree.items():
        path = f"{prefix}{name}"
        if _is_tree(value):
            if kept := drop_paths(value, paths, f"{path}."):
                found[name] = kept
        elif path not in paths:
            found[name] = value
    return found


def merge_trees(tree: Tree[Leaf], part: Tree[Leaf]) -> Tree[Leaf]:
    """Return a tree with the leaves of `part` added; they replace leaves at the same paths."""
    found = dict(tree)
    for name, value in part.items():
        old = found.get(name, {})
        found[name] = merge_trees(old, value) if _is_tree(old) and _is_tree(value) else value
    return found


def num_parameters(model: Model) -> int:
    """Return the number of parameters of `model`."""
    return sum(parameter.size for _, parameter in leaves(parameters(model)))


def num_active_parameters(model: Model) -> int:
    """Return the number of parameters that one token uses: all but those of experts that it is not routed to."""
    share = model.experts.num_active / model.experts.count if model.experts else 1.0
    return sum(
        int(parameter.size * (share if "expert" in parameter.axes else 1.0))
        for _, parameter in leaves(parameters(model))
    )


def matches(pattern: str, path: str) -> bool:
    """Whether a pattern matches a parameter's whole path, the last name in it, or its first names.

    `*` matches any characters, `?` one. Paths are those of `leaves(parameters(model))`.

    >>> [matches(pattern, "layers.mlp_norm") for pattern in ("layers.mlp_norm", "mlp_norm", "layers", "*norm*", "mlp")]
    [True, True, True, True, False]
    """
    return any(fnmatchcase(part, pattern) for part in (path, path.rpartition(".")[2], path.partition(".")[0]))


def check_patterns(what: str, patterns: Iterable[str], paths: Iterable[str]) -> None:
    """Raise if a pattern matches no parameter, suggesting the nearest name.

    Args:
        what: name of the option, for the error.
    """
    known = tuple(paths)
    for pattern in patterns:
        if not any(matches(pattern, path) for path in known):
            names = sorted(
                {*known, *(path.rpartition(".")[2] for path in known), *(p.partition(".")[0] for p in known)}
            )
            hint = did_you_mean(difflib.get_close_matches(pattern.strip("*"), names, n=1, cutoff=0.4))
            raise MeshwrightError(
                f"{what} is {pattern!r}, which names no parameter of the model; {hint}its parameters are"
                f" {', '.join(known)}"
            )
