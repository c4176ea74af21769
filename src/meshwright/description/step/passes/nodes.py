"""The forward pass on a mesh as nodes. A node is one op of the model with its work: what devices do for it (`Work`).

Work is a matmul, a weight to gather, a reshard, attention, another collective or an elementwise pass.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property, lru_cache
from typing import Literal, NamedTuple

from meshwright.description.notation.array import ShardedArray
from meshwright.description.notation.legality import Sizes
from meshwright.description.notation.reshard import reshard
from meshwright.description.notation.steps import Communicate as Inferred
from meshwright.description.step.ir import OPERANDS, Array, Block, Dim, Operand, Pass, Region
from meshwright.description.step.layer import Attention, Gated, LayerOp, Mix
from meshwright.description.step.layer_inputs import LAYER_INPUT, STREAMS
from meshwright.description.step.parameter_tree import IN_USE
from meshwright.description.step.strategy import SequenceMethod, TpStream
from meshwright.mesh import LAYOUT
from meshwright.record import Kind

LETTERS = {
    "embed": "D",
    "kv_heads": "K",
    "group": "G",
    "head_dim": "H",
    "linear_heads": "K",
    "taps": "T",
    "mlp": "F",
    "vocab": "V",
    "expert": "E",
    "router": "E",
    "latent": "L",
    "latent_input": "R",
    "positions": "P",
    "norm": "N",
    "rank": "J",
    "adapter": "M",
    "layer_columns": "W",
    "layer_input": "W",
}
"""The letter in the notation for each logical axis of a parameter."""

IMBALANCE = "loss of imbalance"
"""Name of the all-reduce of the experts' load, for the load balancing loss."""

Phases = tuple[Literal["forward", "recompute", "backward"], ...]


class Tag(Enum):
    """The kind of a node's result, by which remat policies decide whether to save it."""

    PRODUCT = "product"
    """The result of a matmul, or of experts."""
    READ = "read by a product"
    """Another value that a matmul or attention reads."""
    OTHER = "other"


@dataclass(frozen=True, kw_only=True, eq=False)
class Layout:
    """What the shard pass knows of a mesh and a strategy: sharding rules, and the axes larger than 1.

    Layouts are compared by identity, for fast caching: `step.train.layout_of` returns one object per layout.

    Attributes:
        rules: for each logical axis, the mesh axes that shard it.
        live: mesh axes larger than 1.
        batch: axes that split the sequences of a batch.
        sequence: axes that split the tokens of a sequence inside blocks.
        residual: axes that split the tokens of a sequence in the residual stream between blocks.
        sp_method, collective_matmul, tp_stream: as in `Strategy`.
        is_packed: whether a row of the batch has several documents.
        is_pair: whether sp is 2.
        is_zigzag: whether tokens are in zigzag order over sp, so that a device has two parts of a sequence.
        dropout: whether the strategy has dropout.
        is_gathered_once: whether weights are gathered at the start of a step (ZeRO 1 and 2), not in each layer.
        frozen: paths of parameters without gradient.
        whole: paths of parameters that are stored as they are used, although others are stored in shards.
    """

    rules: Mapping[str, tuple[str, ...]]
    live: frozenset[str]
    batch: tuple[str, ...]
    sequence: tuple[str, ...]
    residual: tuple[str, ...]
    sp_method: SequenceMethod
    is_packed: bool
    is_pair: bool
    is_zigzag: bool
    collective_matmul: bool
    tp_stream: TpStream
    dropout: bool
    is_gathered_once: bool = False
    frozen: frozenset[str] = frozenset()
    whole: frozenset[str] = frozenset()

    @cached_property
    def live_rules(self) -> Mapping[str, tuple[str, ...]]:
        """The rules with only the axes larger than 1."""
        return {name: tuple(axis for axis in axes if axis in self.live) for name, axes in self.rules.items()}

    def axes(self, name: str) -> tuple[str, ...]:
        """Return the mesh axes larger than 1 that shard a logical axis."""
        return self.live_rules[name]

    @property
    def tokens(self) -> tuple[Dim, Dim]:
        """Batch and sequence dims of activations inside blocks."""
        return Dim("B", None, self.batch), Dim("S", None, self.sequence)

    @property
    def residual_tokens(self) -> tuple[Dim, Dim]:
        """Batch and sequence dims of the residual stream between blocks."""
        return Dim("B", None, self.batch), Dim("S", None, self.residual)

    def used(self, dims: Iterable[tuple[str, int]]) -> tuple[Dim, ...]:
        """Return the dims of a parameter in use, with the axes that split them. dims: (logical axis, size) of each."""
        return tuple(Dim(LETTERS[name], size, self.axes(IN_USE.get(name, name))) for name, size in dims)

    def stored(self, dims: Iterable[tuple[str, int]]) -> tuple[Dim, ...]:
        """Return the dims of a parameter in storage, with the axes that split them. dims: as in `used`."""
        return tuple(Dim(LETTERS[name], size, self.axes(name)) for name, size in dims)


@dataclass(frozen=True, kw_only=True)
class Product:
    """A matmul with a weight, or with the value named `right`. Fields are as in `ir.Matmul`.

    passes: `forward` if backward has no gradients of this matmul; `backward` if only its two gradients are computed,
    because the forward pass computes its result in another way. right_rows: the rows from which the gradient of the
    right operand is computed, if they are not all.
    """

    name: str
    rows: tuple[Dim, ...]
    inner: tuple[Dim, ...]
    columns: tuple[Dim, ...]
    experts: tuple[Dim, ...] = ()
    is_summed: bool = False
    is_rounded: bool = False
    is_ring: bool = False
    source: str = "X"
    weight: Weight | None = None
    right: str = ""
    passes: Literal["both", "forward", "backward"] = "both"
    right_rows: tuple[Dim, ...] = ()


@dataclass(frozen=True, kw_only=True, eq=False)
class Weight:
    """A parameter with its layouts in storage and in use. Its gradient is resharded in reverse.

    Weights are compared by identity, for fast caching. pending: axes over which the gradient is a partial sum, because
    they split the tokens. is_trained: whether there is a gradient.
    """

    name: str
    stored: Array
    used: Array
    pending: tuple[str, ...]
    is_trained: bool = True


def weight_of(path: str, dims: Iterable[tuple[str, int]], tokens: Iterable[str], layout: Layout) -> Weight:
    """Return a parameter as a `Weight`.

    Args:
        path: the parameter's path; its arrays get the last name in it.
        dims: (logical axis, size) of each of its dims.
        tokens: axes that split the tokens that use the parameter. The gradient is a partial sum over those of them that
            do not split the parameter.
        layout: the layout.
    """
    name, dims = path.rpartition(".")[2], tuple(dims)
    used = layout.used(dims)
    split = {axis for dim in used for axis in dim.axes}
    return Weight(
        name=path,
        stored=Array(name, used if path in layout.whole else layout.stored(dims)),
        used=Array(name, used),
        pending=outermost_first(axis for axis in tokens if axis not in split),
        is_trained=path not in layout.frozen,
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class Vector:
    """A scale or bias, stored as it is used. Its gradient is all-reduced over each group of axes in `pending` in turn.

    Vectors are compared by identity. is_trained: whether there is a gradient.
    """

    name: str
    array: Array
    pending: tuple[tuple[str, ...], ...]
    is_trained: bool = True


@dataclass(frozen=True, kw_only=True)
class Move:
    """A reshard of a value from `before` to `after`. Its gradient is resharded in reverse.

    pending: axes over which the gradient is a partial sum. is_ring: whether it is part of a collective matmul.
    """

    name: str
    before: Array
    after: Array
    pending: tuple[str, ...] = ()
    is_ring: bool = False


@dataclass(frozen=True, kw_only=True)
class Core:
    """The attention op `op` with its sharded arrays. Fields are as in `ir.AttentionOp`."""

    op: Attention
    query: Array
    key: Array
    value: Array
    output: Array
    num_heads: Dim
    gradients: frozenset[Operand] = OPERANDS


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """A collective inside an op. Backward does not reverse it: `phases` lists the phases in which it runs.

    array: the array whose size is the collective's bytes (`record.Collective`). phases: with `recompute`, it runs if
    the node is recomputed. is_end: whether no remat policy saves its result; the train step then adds it separately.
    Other fields are as in `ir.Communicate`.
    """

    name: str
    kind: Kind
    axes: tuple[str, ...]
    array: Array
    phases: Phases
    times: int = 1
    is_ring: bool = False
    is_end: bool = False
    gradient_of: Operand | None = None


@dataclass(frozen=True, kw_only=True)
class PassOver:
    """An elementwise pass over some arrays."""

    kind: Pass
    arrays: tuple[Array, ...]


Work = Product | Weight | Vector | Move | Core | Exchange | PassOver


@dataclass(frozen=True, kw_only=True, eq=False)
class Node:
    """One forward op: the names of the values that it reads and writes, and its work. Compared by identity.

    saved: names of the values that its backward reads. tag: the kind of its result, for remat policies.
    """

    region: Region
    block: Block
    work: tuple[Work, ...]
    reads: tuple[str, ...] = ()
    writes: str = ""
    saved: tuple[str, ...] = ()
    tag: Tag = Tag.OTHER

    @property
    def is_trained(self) -> bool:
        """Whether one of the node's own parameters has a gradient."""
        return any(isinstance(work, Weight | Vector) and work.is_trained for work in self.work)


def from_outside(ops: Iterable[LayerOp], layout: Layout) -> dict[str, Array]:
    """Return the arrays of the values besides the stream that a block's ops read from outside their layer, by name.

    They are the layer's own input, AltUp's streams, and keys and values of an earlier layer (`shared_keys`).
    """
    found: dict[str, Array] = {}
    for op in ops:
        match op:
            case Gated() if op.is_on_residual:
                width = layout.used(((LAYER_INPUT, op.width),))
                found[LAYER_INPUT] = Array(LAYER_INPUT, (*layout.residual_tokens, *width))
            case Mix():
                streams = Dim("K", op.num_streams), Dim("D", op.size)
                found[STREAMS] = Array(STREAMS, (*layout.residual_tokens, *streams))
            case Attention() if op.is_sharing:
                found |= {after.name: after for _, after in shared_keys(op, layout)}
            case _:
                pass
    return found


def shared_keys(op: Attention, layout: Layout) -> Iterator[tuple[Array, Array]]:
    """Yield the keys and the values of an earlier layer, each as this layer left it and as the layers of `op` read it.

    Where each of these layers would gather them, they are gathered once before.
    """
    batch, tokens = layout.tokens
    read = Dim("S", None) if layout.sp_method == "gather" else tokens
    for name, size in ((op.key, op.qk_dim), (op.value, op.value_dim)):
        heads = layout.used((("kv_heads", op.num_kv_heads), ("head_dim", size)))
        yield Array(name, (batch, tokens, *heads)), Array(name, (batch, read, *heads))


class Collected(NamedTuple):
    """One collective of a reshard, with the array before and after it."""

    kind: Kind
    axes: tuple[str, ...]
    before: Array
    after: Array

    @property
    def array(self) -> Array:
        """The array whose size counts as the collective's bytes."""
        return self.after if self.kind == "all-gather" else self.before


@lru_cache(maxsize=1 << 14)
def moves_between(before: Array, after: Array) -> tuple[Collected, ...]:
    """Return the collectives that reshard `before` to `after` (`notation.reshard`). All axes are larger than 1."""
    if before.dims == after.dims and before.unreduced == after.unreduced:
        return ()
    source, target = before.notation, after.notation
    axes = {*source.split_axes, *source.unreduced, *target.split_axes}
    sizes = Sizes(degrees=dict.fromkeys(axes, 2), dims=dict.fromkeys(source.dims, 1 << 20))
    found: list[Collected] = []
    for move in reshard(source, target, sizes):
        if isinstance(move, Inferred):
            operand, result = (_laid(before, array) for array in (move.operand, move.result))
            found.append(Collected(move.kind, move.axes, operand, result))
    return tuple(found)


def _laid(array: Array, sharding: ShardedArray) -> Array:
    """Return an array with the axes and partial sums of `sharding`."""
    dims = tuple(dim._replace(axes=axes) for dim, axes in zip(array.dims, sharding.axes, strict=True))
    return replace(array, dims=dims, unreduced=sharding.unreduced)


def outermost_first(axes: Iterable[str]) -> tuple[str, ...]:
    """Return mesh axes in the order of `LAYOUT`, outermost first."""
    return tuple(sorted(axes, key=LAYOUT.index))
