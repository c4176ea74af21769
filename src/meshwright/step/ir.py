"""A step as data: frozen ops over sharded arrays, grouped into regions that repeat. No JAX, no model.

An array's dims have a size, or are symbolic: `B` sequences, `S` tokens, `C` rows sent to experts have theirs from
`Extents`, so that the same ops serve every batch and every degree of the same mesh axes. Folds over these ops
(`cost`) are all there is of flops, collectives, memory traffic, time and memory.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property, lru_cache
from itertools import count
from typing import Literal, NamedTuple

from meshwright.mesh import MeshShape
from meshwright.notation import ShardedArray
from meshwright.record import Kind, Phase

Width = Literal["compute", "gradient", "float32"]
"""The format of an array's elements: of products, of sums of weights' gradients over devices, or four bytes."""


class Dim(NamedTuple):
    """A dim of an array: its letter in the notation, its size (None where `Extents` has it), the axes that split it."""

    letter: str
    size: int | None
    axes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Array:
    """An array of a step and how it lies on the mesh; unreduced: axes over which it is still a sum to be taken."""

    name: str
    dims: tuple[Dim, ...]
    unreduced: tuple[str, ...] = ()
    width: Width = "compute"

    @cached_property
    def static_size(self) -> int:
        """The product of the dims whose size is known."""
        return math.prod(dim.size for dim in self.dims if dim.size is not None)

    @cached_property
    def symbols(self) -> tuple[str, ...]:
        """The letters of the dims whose size `Extents` has."""
        return tuple(dim.letter for dim in self.dims if dim.size is None)

    @cached_property
    def split_axes(self) -> tuple[str, ...]:
        """Every mesh axis that splits one of its dims."""
        return tuple(axis for dim in self.dims for axis in dim.axes)

    @cached_property
    def notation(self) -> ShardedArray:
        """This array in the notation."""
        letters, axes = tuple(dim.letter for dim in self.dims), tuple(dim.axes for dim in self.dims)
        return ShardedArray(self.name.replace(" ", "_"), letters, axes, self.unreduced)


@dataclass(frozen=True, kw_only=True)
class Extents:
    """The numbers behind a step's symbols: global sizes of symbolic dims, and the degree of each mesh axis."""

    sizes: Mapping[str, float]
    mesh: MeshShape

    def local(self, array: Array) -> float:
        """The elements that one device holds of an array."""
        size: float = array.static_size
        for letter in array.symbols:
            size *= self.sizes[letter]
        degrees = vars(self.mesh)
        for axis in array.split_axes:
            size /= degrees[axis]
        return size

    def local_dims(self, dims: tuple[Dim, ...]) -> float:
        """The product of what one device holds of some dims."""
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
    OPTIMIZER = "optimizer"


class Region(NamedTuple):
    """Where an op repeats: the lookup, the layers of a stack, the logits, between stages, or once in the update.

    is_once: once a step (for each layer of a device) instead of for each microbatch.
    """

    name: str
    is_once: bool = False


@dataclass(frozen=True, kw_only=True)
class Repeat:
    """How often a device runs a region in a step.

    useful: for its microbatches. executed: in the ticks of a pipeline's bubble too. static: as often as it stands in
    the program's text, where branches that few ticks take count as if taken in every tick. mean: the mean over pipeline
    stages. once: for an op that runs once a step, the layers of a device.
    """

    useful: int
    executed: int
    static: int
    mean: float
    once: int = 1


_UNUSED_NUMBERS = count()


@lru_cache(maxsize=1 << 14)
def _number(_work: tuple[object, ...]) -> int:
    """The number of a kind of work: the ops of a step are hashed once, not each time they are priced.

    No number is given twice, so that work which was forgotten is priced again, never for another's time.
    """
    return next(_UNUSED_NUMBERS)


@dataclass(frozen=True, kw_only=True)
class Matmul:
    """A product on one device: [rows, inner] @ [inner, columns], `experts` times.

    role: the product itself, the gradient of its input, or the gradient of its weight. is_summed: whether what it makes
    goes back to the residual stream, so that tp sums it. is_rounded: whether 8-bit products round its operands. source:
    the name of its input. stored: the dims of its weight as it is stored; none where it multiplies with another value,
    called `right`. pending: the axes over which each device has a part of the weight's gradient. image: of a
    convolution what it reads, whose windows are the rows of its left operand (implicit GEMM, arXiv:1410.0759).
    """

    name: str
    target: str
    phase: Phase
    region: Region
    block: Block
    role: Literal["result", "input_gradient", "weight_gradient"]
    rows: tuple[Dim, ...]
    inner: tuple[Dim, ...]
    columns: tuple[Dim, ...]
    experts: tuple[Dim, ...] = ()
    is_summed: bool = False
    is_rounded: bool = False
    is_ring: bool = False
    source: str = "X"
    right: str = ""
    stored: tuple[Dim, ...] = ()
    pending: tuple[str, ...] = ()
    image: Array | None = None

    @cached_property
    def work(self) -> int:
        """A number that products which take the same time share, in whatever pass (`_number`)."""
        sizes = (self.rows, self.inner, self.columns, self.experts, self.image)
        return _number((self.role, sizes, self.is_summed, self.is_rounded, self.is_ring))


Operand = Literal["query", "key", "value"]
"""What attention reads."""

OPERANDS: frozenset[Operand] = frozenset(("query", "key", "value"))


@dataclass(frozen=True, kw_only=True)
class AttentionOp:
    """Attention of queries over keys: scores, softmax, and the product with the values.

    windows: how many keys a query may attend to, of each layer in a cycle; None for all before it. is_scores_alone:
    whether backward recomputes the scores without their product with the values. cache: what a device of a server holds
    of keys and values. gradients: which of its operands backward makes gradients of.
    """

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
    windows: tuple[int | None, ...]
    is_scores_alone: bool = False
    is_of_chunks: bool = False
    cache: tuple[Array, ...] = ()
    gradients: frozenset[Operand] = OPERANDS

    @cached_property
    def work(self) -> int:
        """A number that attention ops which take the same time share."""
        sizes = (self.query, self.qk_dim, self.value_dim, self.windows, len(self.gradient_products))
        return _number((self.phase == "backward", sizes, self.is_scores_alone, self.is_of_chunks))

    @property
    def gradient_products(self) -> tuple[tuple[Literal["scores", "values"], Literal["left", "right"]], ...]:
        """The products of backward through memory: the gradients of both operands of each of attention's products.

        Those that lead to no operand with a gradient are left out: that of the weights serves queries and keys.
        """
        has_scores = not self.gradients.isdisjoint(("query", "key"))
        made = {
            ("values", "left"): has_scores,
            ("values", "right"): "value" in self.gradients,
            ("scores", "left"): "query" in self.gradients,
            ("scores", "right"): "key" in self.gradients,
        }
        return tuple(product for product, is_made in made.items() if is_made)  # type: ignore[return-value]


Pass = Literal[
    "norm", "layer_norm", "residual", "low_rank", "low_rank_dropout", "branch", "rotary", "gated", "activation",
    "dropout", "accumulate", "loss", "batch_norm", "batch_norm_add", "batch_norm_shortcut", "gradients", "pool",
]  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Elementwise:
    """A pass over memory: what is between products, over the elements of some arrays."""

    kind: Pass
    phase: Phase
    region: Region
    block: Block
    arrays: tuple[Array, ...]

    @cached_property
    def work(self) -> int:
        """A number that passes which take the same time share."""
        return _number((self.kind, self.phase == "backward", self.arrays))


@dataclass(frozen=True, kw_only=True)
class Communicate:
    """A collective over `axes`; bytes are those of `array` (`record.Collective`).

    is_ring: P - 1 sends round a ring of the axes' degree, of `array` each. of_weight: whether it gathers a weight, or
    sums its gradient or the norm of it. skipped: runs that a compiler leaves out of those executed. name: as records
    show it. before, after: the array it brings from one layout to another, where it is a move of one. beside: arrays
    that go in the same collective.
    """

    name: str
    kind: Kind
    axes: tuple[str, ...]
    phase: Phase
    region: Region
    array: Array
    before: Array | None = None
    after: Array | None = None
    times: int = 1
    skipped: int = 0
    is_ring: bool = False
    of_weight: bool = False
    beside: tuple[Array, ...] = ()


ComputingOp = Matmul | AttentionOp | Elementwise
"""An op that takes time of the chip's own."""

Op = ComputingOp | Communicate


@dataclass(frozen=True, eq=False)
class Ops:
    """The ops of a step in the order of its forward pass, each followed by its recomputation and its backward.

    They depend on which mesh axes are larger than 1, not on their degrees or the batch.
    """

    ops: tuple[Op, ...]

    @cached_property
    def matmuls(self) -> tuple[Matmul, ...]:
        """The products with weights, and their gradients."""
        return tuple(op for op in self.ops if isinstance(op, Matmul))

    @cached_property
    def attention(self) -> tuple[AttentionOp, ...]:
        """Attention."""
        return tuple(op for op in self.ops if isinstance(op, AttentionOp))

    @cached_property
    def elementwise(self) -> tuple[Elementwise, ...]:
        """The passes over memory."""
        return tuple(op for op in self.ops if isinstance(op, Elementwise))

    @cached_property
    def computing(self) -> Mapping[str, ComputingOps]:
        """The ops of each region that compute, in all passes."""
        regions: dict[str, list[ComputingOp]] = {}
        for op in (*self.matmuls, *self.attention, *self.elementwise):
            regions.setdefault(op.region.name, []).append(op)
        return {name: _computing(ops) for name, ops in regions.items()}

    @cached_property
    def communication(self) -> tuple[Communicate, ...]:
        """The collectives."""
        return tuple(op for op in self.ops if isinstance(op, Communicate))

    @cached_property
    def forward(self) -> Mapping[str, ForwardOps]:
        """The ops of each region in the forward pass that compute."""
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
    """What a region computes in all passes.

    attention, rest: attention, and all else. of_queries: of the rest, the products with the gradient of attention's
    queries and of their weight, and the sum of that weight's gradient over microbatches.
    """

    attention: tuple[AttentionOp, ...]
    rest: tuple[Matmul | Elementwise, ...]
    of_queries: tuple[Matmul | Elementwise, ...]


def _computing(ops: list[ComputingOp]) -> ComputingOps:
    """The ops of one region by kind."""
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
    """What a region computes in the forward pass."""

    matmuls: tuple[Matmul, ...]
    attention: tuple[AttentionOp, ...]
    elementwise: tuple[Elementwise, ...]


@dataclass(frozen=True, kw_only=True)
class Step:
    """A step on a mesh: its ops, how often each region repeats, and the sizes of its symbols.

    stages: what stages hand on to each other, which depends on the schedule.
    """

    ops: Ops
    stages: tuple[Communicate, ...] = ()
    repeats: Mapping[str, Repeat]
    extents: Extents

    @property
    def communication(self) -> tuple[Communicate, ...]:
        """Every collective of the step."""
        return self.ops.communication + self.stages
