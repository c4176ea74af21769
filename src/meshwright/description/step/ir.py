"""A step as data: frozen ops over sharded arrays, grouped into regions that repeat. Independent of JAX and of models.

A dim has a fixed or a symbolic size. `Extents` has the values of symbolic sizes, such as `B` sequences, `S` tokens and
`C` rows sent to experts, so that the same ops serve every batch and every degree of the same mesh axes. A region
is a part of the step whose ops all run equally often; a computing op is any op but a collective. Flops, collectives,
memory traffic, time and memory are sums over these ops (`planning.cost`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property, lru_cache
from itertools import count
from typing import Literal, NamedTuple

from meshwright.description.notation.array import ShardedArray
from meshwright.mesh import MeshShape
from meshwright.record import Kind, Phase

Width = Literal["compute", "gradient", "float32"]
"""Dtype of an array's elements: the compute dtype, the gradient dtype, or float32."""


class Dim(NamedTuple):
    """A dim of an array: its letter in the notation, its global size, and the mesh axes that split it.

    size: None if it is symbolic; `Extents` then has it, by the letter.
    """

    letter: str
    size: int | None
    axes: tuple[str, ...] = ()


def axes_of(dims: Iterable[Dim]) -> tuple[str, ...]:
    """Return the axes that split any of the dims. A matmul that sums over these dims leaves partial sums over them."""
    return tuple(axis for dim in dims for axis in dim.axes)


@dataclass(frozen=True)
class Array:
    """An array of a step and its layout on the mesh."""

    name: str
    dims: tuple[Dim, ...]
    unreduced: tuple[str, ...] = ()  # Axes over which each device holds a partial sum.
    width: Width = "compute"

    @cached_property
    def static_size(self) -> int:
        """Product of the sizes of all dims that are not symbolic."""
        return math.prod(dim.size for dim in self.dims if dim.size is not None)

    @cached_property
    def symbols(self) -> tuple[str, ...]:
        """Letters of the symbolic dims."""
        return tuple(dim.letter for dim in self.dims if dim.size is None)

    @cached_property
    def split_axes(self) -> tuple[str, ...]:
        """Every mesh axis that splits a dim of the array."""
        return axes_of(self.dims)

    @cached_property
    def notation(self) -> ShardedArray:
        """This array as a `ShardedArray` of the notation."""
        letters, axes = tuple(dim.letter for dim in self.dims), tuple(dim.axes for dim in self.dims)
        return ShardedArray(self.name.replace(" ", "_"), letters, axes, self.unreduced)


@dataclass(frozen=True, kw_only=True)
class Extents:
    """Values of a step's symbols: global sizes of symbolic dims, and the degree of each mesh axis."""

    sizes: Mapping[str, float]
    mesh: MeshShape

    def local(self, array: Array) -> float:
        """Return how many elements of an array one device holds."""
        size: float = array.static_size
        for letter in array.symbols:
            size *= self.sizes[letter]
        degrees = vars(self.mesh)
        for axis in array.split_axes:
            size /= degrees[axis]
        return size

    def local_dims(self, dims: tuple[Dim, ...]) -> float:
        """Return how many elements one device holds of an array with these dims."""
        degrees, size = vars(self.mesh), 1.0
        for dim in dims:
            size *= self.sizes[dim.letter] if dim.size is None else dim.size
            for axis in dim.axes:
                size /= degrees[axis]
        return size


class Block(StrEnum):
    """The part of a step that an op belongs to."""

    EMBEDDING = "embedding"
    ATTENTION = "attention"
    MLP = "mlp"
    LOGITS = "logits"
    STAGES = "stages"


class Region(NamedTuple):
    """Part of a step whose ops all run equally often: embedding, a stack's layers, logits, stage transfers, update."""

    name: str
    is_once: bool = False  # Runs once per step (for each layer of a device), not per microbatch.


@dataclass(frozen=True, kw_only=True)
class Repeat:
    """How often a device runs a region in a step."""

    useful: int  # Runs that process a microbatch.
    executed: int  # `useful` and the runs in the ticks of a pipeline's bubble.
    static: int  # Runs counted in the HLO text, where branches taken in few ticks count as if taken in every tick.
    mean: float  # `executed` as a mean over pipeline stages.
    once: int = 1  # Runs of an op with `Region.is_once`: 1, or one for each layer of a device.


_UNUSED_NUMBERS = count()


@lru_cache(maxsize=1 << 14)
def _number(_work: tuple[object, ...]) -> int:
    """Return an integer id for work of equal cost, so that an op is hashed only once.

    Ids are never reused: work evicted from this cache gets a new id, and its cost is computed again.
    """
    return next(_UNUSED_NUMBERS)


@dataclass(frozen=True, kw_only=True)
class Matmul:
    """A matmul on one device: [rows, inner] @ [inner, columns], `experts` times."""

    name: str
    target: str  # Name of the result in the forward pass.
    phase: Phase
    region: Region
    block: Block
    # The matmul of the forward pass, the gradient of its input, or the gradient of its weight.
    role: Literal["result", "input_gradient", "weight_gradient"]
    rows: tuple[Dim, ...]
    inner: tuple[Dim, ...]
    columns: tuple[Dim, ...]
    experts: tuple[Dim, ...] = ()
    is_summed: bool = False  # Whether the result is added to the residual stream, and so summed over tp.
    is_rounded: bool = False  # Whether 8-bit strategies round its operands.
    is_ring: bool = False  # Whether it may overlap with the ring of a collective matmul.
    source: str = "X"  # Name of its input.
    right: str = ""  # Name of the second operand if that is a value; '' if it is a weight.
    stored: tuple[Dim, ...] = ()  # Dims of its weight in storage; empty if it has no weight.
    pending: tuple[str, ...] = ()  # Axes over which the weight's gradient is a partial sum.
    skipped: int = 0  # As in `Communicate`.

    @cached_property
    def work(self) -> int:
        """An id shared by all matmuls of equal cost, in any phase (`_number`)."""
        sizes = (self.rows, self.inner, self.columns, self.experts)
        return _number((self.role, sizes, self.is_summed, self.is_rounded, self.is_ring))


Operand = Literal["query", "key", "value"]
"""The inputs of attention."""

OPERANDS: frozenset[Operand] = frozenset(("query", "key", "value"))


@dataclass(frozen=True, kw_only=True)
class AttentionOp:
    """Attention: scores of queries and keys, softmax, and the matmul with the values."""

    name: str
    phase: Phase
    region: Region
    query: Array
    key: Array
    value: Array
    output: Array
    num_heads: Dim
    qk_dim: int
    value_dim: int
    # Keys a query may attend to, for each layer of a repeating cycle; None: all before it.
    windows: tuple[int | None, ...]
    is_chunked: bool = False  # Whether a window is a chunk of the sequence (`AttentionConfig`).
    is_scores_alone: bool = False  # Whether only the scores are recomputed, not their matmul with the values.
    is_of_chunks: bool = False  # Whether it is the recomputation of scores in a loop over chunks of queries.
    cache: tuple[Array, ...] = ()  # In a server's step: the cached keys and values that a device has.
    gradients: frozenset[Operand] = OPERANDS  # Operands whose gradient backward computes.
    is_sharing: bool = False  # Whether its keys and values are those of an earlier layer.
    skipped: float = 0.0  # As in `Communicate`; a fraction where the compiler removes some of its matmuls.

    @cached_property
    def work(self) -> int:
        """An id shared by all attention ops of equal cost."""
        keys = (self.windows, self.is_chunked)
        sizes = (self.query, self.qk_dim, self.value_dim, keys, len(self.gradient_products))
        return _number((self.phase == "backward", sizes, self.is_scores_alone, self.is_of_chunks))

    @property
    def gradient_products(self) -> tuple[tuple[Literal["scores", "values"], Literal["left", "right"]], ...]:
        """The backward matmuls of attention whose scores go through memory.

        Each is the gradient of one operand of one forward matmul, as (forward matmul, operand). Matmuls that no operand
        in `gradients` needs are left out. Queries and keys both need the gradient of the softmax.
        """
        has_scores = not self.gradients.isdisjoint(("query", "key"))
        made = {
            ("values", "left"): has_scores,
            ("values", "right"): "value" in self.gradients,
            ("scores", "left"): "query" in self.gradients,
            ("scores", "right"): "key" in self.gradients,
        }
        return tuple(product for product, is_made in made.items() if is_made)  # type: ignore[return-value]

    @property
    def pair_flops(self) -> int:
        """Flops of its matmuls for each query and key of a head, where scores go through memory."""
        if self.phase == "backward":
            return sum(2 * (self.qk_dim if kind == "scores" else self.value_dim) for kind, _ in self.gradient_products)
        return 2 * (self.qk_dim + (0 if self.is_scores_alone else self.value_dim))


Pass = Literal[
    "norm", "layer_norm", "residual", "low_rank", "low_rank_dropout", "branch", "rotary", "gated", "activation",
    "dropout", "accumulate", "loss", "batch_norm", "batch_norm_add", "batch_norm_shortcut", "gradients", "pool",
    "dispatch", "combine", "convolution", "delta", "delta_factors", "delta_parts", "state",
]  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Elementwise:
    """An elementwise pass over `arrays` in memory, between matmuls."""

    kind: Pass
    phase: Phase
    region: Region
    block: Block
    arrays: tuple[Array, ...]

    @cached_property
    def work(self) -> int:
        """An id shared by all elementwise ops of equal cost."""
        return _number((self.kind, self.phase == "backward", self.arrays))


@dataclass(frozen=True, kw_only=True)
class Communicate:
    """A collective over `axes`; its bytes are those of `array` (`record.Collective`)."""

    name: str  # As records show it.
    kind: Kind
    axes: tuple[str, ...]
    phase: Phase
    region: Region
    array: Array
    before: Array | None = None  # The array before it; None if it is not part of a reshard.
    after: Array | None = None  # The array after it; None if it is not part of a reshard.
    times: int = 1  # Runs in each run of its region.
    skipped: int = 0  # Runs in a step that the compiler removes.
    is_ring: bool = False  # Whether it stands for P - 1 sends of `array` round a ring of P devices.
    gradient_of: Operand | None = None  # The operand of attention whose gradient it sends over sp.
    of_weight: bool = False  # Whether it gathers a weight, sums a weight's gradient, or is part of the update.
    beside: tuple[Array, ...] = ()  # Further arrays combined into the same collective.


ComputingOp = Matmul | AttentionOp | Elementwise
"""An op that computes, or reads and writes memory: any op but a collective."""

Op = ComputingOp | Communicate


@dataclass(frozen=True, eq=False)
class Ops:
    """The ops of a step in forward order, each followed by its recomputation and its backward.

    They depend on which mesh axes are larger than 1, not on their degrees or the batch.
    """

    ops: tuple[Op, ...]

    @cached_property
    def matmuls(self) -> tuple[Matmul, ...]:
        """All matmuls, in all phases."""
        return tuple(op for op in self.ops if isinstance(op, Matmul))

    @cached_property
    def attention(self) -> tuple[AttentionOp, ...]:
        """All attention ops."""
        return tuple(op for op in self.ops if isinstance(op, AttentionOp))

    @cached_property
    def elementwise(self) -> tuple[Elementwise, ...]:
        """All elementwise ops."""
        return tuple(op for op in self.ops if isinstance(op, Elementwise))

    @cached_property
    def computing(self) -> Mapping[str, ComputingOps]:
        """The matmuls, attention and elementwise ops in all phases, by the region's name."""
        regions: dict[str, list[ComputingOp]] = {}
        for op in (*self.matmuls, *self.attention, *self.elementwise):
            regions.setdefault(op.region.name, []).append(op)
        return {name: _computing(ops) for name, ops in regions.items()}

    @cached_property
    def communication(self) -> tuple[Communicate, ...]:
        """All collectives except sends between pipeline stages (`Step.stages`)."""
        return tuple(op for op in self.ops if isinstance(op, Communicate))

    @cached_property
    def forward(self) -> Mapping[str, ForwardOps]:
        """The matmuls, attention and elementwise ops of the forward pass, by the region's name."""
        names = {op.region.name for op in (*self.matmuls, *self.attention, *self.elementwise)}
        return {
            name: ForwardOps(
                tuple(op for op in self.matmuls if op.region.name == name and op.phase == "forward"),
                tuple(op for op in self.attention if op.region.name == name and op.phase == "forward"),
                tuple(op for op in self.elementwise if op.region.name == name and op.phase == "forward"),
            )
            for name in names
        }


class ComputingOps(NamedTuple):
    """The computing ops of one region, in all phases, by kind."""

    attention: tuple[AttentionOp, ...]
    rest: tuple[Matmul | Elementwise, ...]  # All other ops.
    # Those of `rest` that are backward matmuls of the query projection or accumulate its weight gradient.
    of_queries: tuple[Matmul | Elementwise, ...]


def _computing(ops: list[ComputingOp]) -> ComputingOps:
    """Group the computing ops of one region by kind."""
    attention = tuple(op for op in ops if isinstance(op, AttentionOp))
    rest = tuple(op for op in ops if not isinstance(op, AttentionOp))
    queries = {op.query.name for op in attention}
    products = [op for op in rest if isinstance(op, Matmul) and op.target in queries and op.phase == "backward"]
    weights = {product.name.rpartition(".")[2] for product in products}
    sums = [
        op for op in rest
        if isinstance(op, Elementwise) and op.kind == "accumulate" and any(array.name in weights for array in op.arrays)
    ]  # fmt: skip
    return ComputingOps(attention, rest, (*products, *sums))


class ForwardOps(NamedTuple):
    """The computing ops of one region in the forward pass, by kind."""

    matmuls: tuple[Matmul, ...]
    attention: tuple[AttentionOp, ...]
    elementwise: tuple[Elementwise, ...]


@dataclass(frozen=True, kw_only=True)
class Step:
    """A step on a mesh: its ops, how often each region repeats, and the sizes of its symbols."""

    ops: Ops
    stages: tuple[Communicate, ...] = ()  # Sends between pipeline stages, which depend on the schedule.
    repeats: Mapping[str, Repeat]
    extents: Extents

    @property
    def communication(self) -> tuple[Communicate, ...]:
        """Every collective of the step, including sends between stages."""
        return self.ops.communication + self.stages
