"""The forward pass on a mesh: nodes with their work, sharded arrays, and moves between layouts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property, lru_cache
from typing import Literal, NamedTuple

from meshwright.description.notation.array import ShardedArray
from meshwright.description.notation.legality import Sizes
from meshwright.description.notation.reshard import reshard
from meshwright.description.notation.steps import Communicate as Inferred
from meshwright.description.step.ir import OPERANDS, Array, Block, Dim, Operand, Pass, Region
from meshwright.description.step.layer import (
    Attention,
)
from meshwright.description.step.strategy import SequenceMethod, TpStream
from meshwright.mesh import LAYOUT
from meshwright.record import Kind

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
    "norm": "N",
    "rank": "J",
}
"""The dims of parameters as the notation writes them."""

IMBALANCE = "loss of imbalance"
"""The load of experts in the loss."""

EXCHANGED_GRADIENTS: Mapping[Operand, str] = {
    "query": "queries gradient",
    "key": "keys gradient",
    "value": "values gradient",
}
"""The names of the exchanges of attention's gradients over a split sequence."""

Phases = tuple[Literal["forward", "recompute", "backward"], ...]

STORAGE_ONLY = {"embed": "activation", "latent_input": "activation"}
"""Logical axes that shard a parameter only in storage: in use the dim is gathered and sharded like this one."""


class Tag(Enum):
    """Name of a layer's value for remat policies."""

    PRODUCT = "product"
    READ = "read by a product"
    OTHER = "other"


@dataclass(frozen=True, kw_only=True, eq=False)
class Layout:
    """Sharding information for the shard pass: axes with several devices, and sharding rules.

    Compared by identity, which makes caching fast (`step.train.layout_of` makes each once). batch: axes that split
    sequences. sp_method: how queries meet the keys of a split sequence. is_packed: whether rows hold several documents.
    is_pair: whether sp is 2. frozen: paths of parameters without gradient.
    """

    rules: Mapping[str, tuple[str, ...]]
    live: frozenset[str]
    batch: tuple[str, ...]
    sequence: tuple[str, ...]
    residual: tuple[str, ...]
    sp_method: SequenceMethod
    is_packed: bool
    is_pair: bool
    collective_matmul: bool
    tp_stream: TpStream
    dropout: bool
    frozen: frozenset[str] = frozenset()

    @cached_property
    def live_rules(self) -> Mapping[str, tuple[str, ...]]:
        """The live axes of each rule."""
        return {name: tuple(axis for axis in axes if axis in self.live) for name, axes in self.rules.items()}

    def axes(self, name: str) -> tuple[str, ...]:
        """The live axes of a rule."""
        return self.live_rules[name]

    @property
    def tokens(self) -> tuple[Dim, Dim]:
        """Batch and sequence dims in products."""
        return Dim("B", None, self.batch), Dim("S", None, self.sequence)

    @property
    def residual_tokens(self) -> tuple[Dim, Dim]:
        """Batch and sequence dims of the residual stream between blocks."""
        return Dim("B", None, self.batch), Dim("S", None, self.residual)

    def used(self, dims: Iterable[tuple[str, int]]) -> tuple[Dim, ...]:
        """The dims of a parameter as products use it."""
        return tuple(Dim(LETTERS[name], size, self.axes(STORAGE_ONLY.get(name, name))) for name, size in dims)

    def stored(self, dims: Iterable[tuple[str, int]]) -> tuple[Dim, ...]:
        """Dims of a parameter in storage."""
        return tuple(Dim(LETTERS[name], size, self.axes(name)) for name, size in dims)


@dataclass(frozen=True, kw_only=True)
class Product:
    """A product with a weight, or with another value, called `right`. image: as in `Matmul`."""

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
    image: Array | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class Weight:
    """A parameter on its way from storage to its use, and its gradient on the way back.

    Compared by identity, which makes caching fast. pending: axes over which each device has a partial gradient: those
    that split its tokens. is_trained: whether there is a gradient.
    """

    name: str
    stored: Array
    used: Array
    pending: tuple[str, ...]
    is_trained: bool = True


@dataclass(frozen=True, kw_only=True, eq=False)
class Vector:
    """A scale or bias that every device has whole. Its gradient is summed over each group of axes in turn.

    Equal only to itself. is_trained: whether there is a gradient.
    """

    name: str
    array: Array
    pending: tuple[tuple[str, ...], ...]
    is_trained: bool = True


@dataclass(frozen=True, kw_only=True)
class Move:
    """A value brought from one layout to another; its gradient, a sum over `pending`, goes the other way."""

    name: str
    before: Array
    after: Array
    pending: tuple[str, ...] = ()
    is_ring: bool = False


@dataclass(frozen=True, kw_only=True)
class Core:
    """Attention between its products, with the arrays that it has on one device.

    gradients: as of an `AttentionOp`.
    """

    op: Attention
    query: Array
    key: Array
    value: Array
    output: Array
    num_heads: Dim
    gradients: frozenset[Operand] = OPERANDS


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """A collective inside a custom kernel.

    array: as in `record.Collective`. phases: in which it runs; recompute counts if the node is recomputed.
    """

    name: str
    kind: Kind
    axes: tuple[str, ...]
    array: Array
    phases: Phases
    times: int = 1
    is_ring: bool = False
    is_end: bool = False


@dataclass(frozen=True, kw_only=True)
class PassOver:
    """An elementwise pass over the elements of some arrays."""

    kind: Pass
    arrays: tuple[Array, ...]


Work = Product | Weight | Vector | Move | Core | Exchange | PassOver


@dataclass(frozen=True, kw_only=True, eq=False)
class Node:
    """One forward op: names of the values it reads and writes, and its work. Compared by identity.

    saved: values that its backward reads. tag: name of its result for remat policies.
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
        """Whether one of its own parameters has a gradient."""
        return any(isinstance(work, Weight | Vector) and work.is_trained for work in self.work)


class Collected(NamedTuple):
    """A collective of a move: its array before and after."""

    kind: Kind
    axes: tuple[str, ...]
    before: Array
    after: Array

    @property
    def array(self) -> Array:
        """The array that its bytes are of."""
        return self.after if self.kind == "all-gather" else self.before


@lru_cache(maxsize=1 << 14)
def moves_between(before: Array, after: Array) -> tuple[Collected, ...]:
    """The collectives from one layout to another, by `notation.reshard`.

    It needs degrees only to tell axes of one device.
    """
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


def _laid(array: Array, to: ShardedArray) -> Array:
    """Return an array in the notation."""
    dims = tuple(dim._replace(axes=axes) for dim, axes in zip(array.dims, to.axes, strict=True))
    return replace(array, dims=dims, unreduced=to.unreduced)


def outermost_first(axes: Iterable[str]) -> tuple[str, ...]:
    """Mesh axes in the order in which they are laid over devices."""
    return tuple(sorted(axes, key=LAYOUT.index))
