"""The ops that models are written in. They read and write named values, and declare parameters.

An op reads values by name and writes one. `STREAM` is the residual stream [batch, sequence, embed]: the input and the
output of a layer. Shapes are of one layer; a `Stack` repeats its ops over layers and stacks their parameters.
Parameters, forward pass, flops, communication and memory all follow from these ops (`step.passes`, `models`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal, TypeVar

from meshwright.description.step.frequencies import Frequencies

STREAM = "stream"
"""The name of the residual stream."""

Activation = Literal["silu", "gelu", "gelu_tanh", "relu", "relu2"]
NormKind = Literal["rms", "layer"]

T = TypeVar("T")

Dims = tuple[tuple[str, int], ...]
"""Dims as (logical axis, size)."""

HEADS = ("kv_heads", "group", "head_dim")
"""Logical axes of queries: heads are grouped by the kv head they share, so that splitting kv_heads splits both alike.
"""


LINEAR_HEADS = "linear_heads"
"""Logical axis of the query and key heads of linear attention, which are neither padded nor copied."""

DELTA_CHUNK = 64
"""Tokens of a chunk of the gated delta rule: sequences are padded to whole chunks."""


def vector_dims(outputs: Dims) -> Dims:
    """Return the dims of a vector over a matmul's outputs. Over embed it is stored whole, like a norm's scale."""
    return tuple(("norm" if name == "embed" else name, size) for name, size in outputs)


@dataclass(frozen=True, kw_only=True)
class Norm:
    """RMSNorm or LayerNorm of `source` over its last dim, of `size` elements; its scale is the parameter `name`."""

    name: str
    source: str
    target: str
    size: int
    # Last dims of `source` that are normalised together, `size` elements in all (OLMo 2: all heads). Their mesh axes
    # split the scale; squares are summed over these axes.
    dims: Dims = ()
    kind: NormKind = "rms"
    epsilon: float = 1e-5
    offset: float = 0.0  # Added to the scale (Gemma stores it minus 1).
    has_bias: bool = False  # Whether the parameter `{name}_bias` is added.
    has_scale: bool = True  # False: an RMSNorm without any parameter (Llama 4's queries and keys).
    by_layer: tuple[bool, ...] = (True,)  # Whether each layer of a repeating cycle has it; one entry if all are alike.


@dataclass(frozen=True, kw_only=True)
class LowRank:
    """A LoRA branch beside a matmul (arXiv:2106.09685) that adds scale * B A x.

    A is the parameter `{name}_lora_a` [*inputs, *dims], B is `{name}_lora_b` [*dims, *outputs]. Beside a lookup, rows
    of A are looked up.

    has_magnitude: DoRA (arXiv:2402.09353). The sum is multiplied by m / n for each output, before the bias: m is the
    parameter `{name}_lora_m` [*outputs], and n the norm of the output's column of W + scale * A B. n has no gradient
    (section 4.3).
    """

    rank: int
    scale: float
    dropout: float = 0.0  # Probability of dropping an element of A's input in a train step.
    slots: int = 0  # Adapters held side by side, of which each row of a server's step uses one; 0: one, for all tokens.
    has_magnitude: bool = False

    @property
    def dims(self) -> Dims:
        """The dims between A and B: the rank, after the slots if there are any."""
        return (*((("adapter", self.slots),) if self.slots else ()), ("rank", self.rank))


@dataclass(frozen=True, kw_only=True)
class Linear:
    """Matmul of `source` with the weight `name` [*inputs, *outputs], summed over `inputs`.

    A weight of experts is [expert, *inputs, *outputs], and `source` is the rows of each expert (`Dispatch`).
    """

    name: str
    source: str
    target: str
    inputs: Dims
    outputs: Dims
    num_experts: int = 0
    init_scale: float | None = None  # Standard deviation at initialisation; None: 1 / sqrt(fan in).
    has_bias: bool = False  # Whether the parameter `{name}_bias` [*outputs] is added.
    is_rounded: bool = True  # Whether 8-bit strategies round its operands.
    # Whether the input is the residual stream as stored between blocks, in float32 and not gathered over tp (routers).
    is_on_residual: bool = False
    # Whether frameworks that fuse queries, keys and values into one array store this weight in it, after the queries'.
    is_fused: bool = False
    is_tied: bool = False  # Whether the weight is the embedding table that a `Lookup` declares, [*outputs, *inputs].
    low_rank: LowRank | None = None

    @property
    def branch(self) -> str:
        """The name of its low-rank branch: a tied head has its own, beside that of the lookup."""
        return "unembedding" if self.is_tied else self.name

    @property
    def bias_dims(self) -> Dims:
        """Logical axis and size of each bias dim."""
        return *((("expert", self.num_experts),) if self.num_experts else ()), *vector_dims(self.outputs)

    @property
    def fan_in(self) -> int:
        """Number of elements summed for each element of the result."""
        return math.prod(size for _, size in self.inputs)


@dataclass(frozen=True, kw_only=True)
class Rotary:
    """Rotary position embedding (arXiv:2104.09864) of queries and keys, in place."""

    values: tuple[str, ...]
    # Dims of a head that are rotated, from `start`; the others are unchanged (GPT-NeoX rotates a quarter). If odd, one
    # more dim is rotated, with the frequencies of the odd size.
    size: int
    # Frequencies of each layer, as a repeating cycle; one entry if all layers are alike.
    by_layer: tuple[Frequencies, ...]
    start: int = 0
    is_interleaved: bool = False  # Rotate pairs of adjacent dims (DeepSeek) instead of dims half the size apart.


@dataclass(frozen=True, kw_only=True)
class LatentKeys:
    """Names of the values that a server caches instead of keys and values (DeepSeek-V2, arXiv:2405.04434, 2.1)."""

    latent: str  # Value from which keys and values are computed.
    rotary: str  # Part of the key that all heads share.
    key_weight: str  # Weight from the latent to keys.
    value_weight: str


@dataclass(frozen=True, kw_only=True)
class Attention:
    """Causal attention of `query` over `key` and `value`, grouped by kv heads."""

    query: str
    key: str
    value: str
    target: str
    num_heads: int
    num_kv_heads: int
    qk_dim: int  # Dims of a head.
    value_dim: int
    # Keys a query may attend to, for each layer of a repeating cycle; None: all before it.
    windows: tuple[int | None, ...] = (None,)
    is_chunked: bool = False  # Whether a window is a chunk, as in `AttentionConfig`.
    softcap: float | None = None  # Scores become softcap * tanh(scores / softcap).
    scale: float | None = None  # Factor of the scores; None: 1 / sqrt(qk_dim).
    has_alibi: bool = False
    # Whether each head has a learned logit without a value in every softmax: the parameter `sinks` [kv_heads, group]
    # (arXiv:2309.17453).
    has_sinks: bool = False
    latent: LatentKeys | None = None  # What a server caches instead of keys and values.


@dataclass(frozen=True, kw_only=True)
class GatedDelta:
    """The gated delta rule (arXiv:2412.06464): linear attention with a state [key_dim, value_dim] for each value head.

    For each token the state S is decayed by exp(g) and corrected towards the token's value v at its key k, with rate b:
    S = exp(g) S, then S += k (b (v - S^T k))^T. The output is S^T q. Queries, keys and values first pass a causal
    convolution of each channel over `taps` tokens and a SiLU; queries and keys are normalised to unit length, and
    queries scaled by 1 / sqrt(key_dim). g = -exp(decay_log) * softplus(decay + decay_bias) and b = sigmoid(rate).

    Its parameters are `conv_query`, `conv_key` [taps, heads, key_dim], `conv_value` [taps, heads, group, value_dim],
    `decay_log` and `decay_bias` [heads, group].
    """

    query: str  # [batch, sequence, heads, key_dim], like keys.
    key: str
    value: str  # [batch, sequence, heads, group, value_dim]
    decay: str  # [batch, sequence, heads, group], like rates.
    rate: str
    target: str  # As values.
    num_heads: int  # Of queries and keys.
    group: int  # Value heads that share a query and key head.
    key_dim: int
    value_dim: int
    taps: int

    @property
    def convolved(self) -> tuple[tuple[str, str, Dims], ...]:
        """The values that are convolved: (parameter, value, dims of the value's channels)."""
        heads, group = (LINEAR_HEADS, self.num_heads), ("group", self.group)
        keys: Dims = (heads, ("head_dim", self.key_dim))
        values: Dims = (heads, group, ("head_dim", self.value_dim))
        return ("conv_query", self.query, keys), ("conv_key", self.key, keys), ("conv_value", self.value, values)


@dataclass(frozen=True, kw_only=True)
class ClampedSwiglu:
    """gate * sigmoid(alpha * gate) * (up + 1), with gate <= limit and |up| <= limit (gpt-oss, arXiv:2508.10925)."""

    alpha: float = 1.702
    limit: float = 7.0


@dataclass(frozen=True, kw_only=True)
class Gated:
    """The activation of an MLP: function(gate) * up, or function(source) if there is one source."""

    sources: tuple[str, ...]
    target: str
    function: Activation | ClampedSwiglu = "silu"
    width: int = 0  # Dims of the result over all devices.


@dataclass(frozen=True, kw_only=True)
class Routing:
    """How the router's logits choose experts for a token and weight them."""

    # Score of an expert: softmax over all experts, or sigmoid of each logit (DeepSeek-V3, arXiv:2412.19437, section
    # 2.1.2).
    scores: Literal["softmax", "sigmoid"] = "softmax"
    # Whether the parameter `choice_bias` is added to scores for the choice only. It has no gradient.
    has_choice_bias: bool = False
    num_groups: int = 1  # Equal groups of experts (DeepSeek-V2, arXiv:2405.04434, section 2.2.2).
    num_active_groups: int = 1  # Groups that a token may choose from.
    group_score: int = 1  # A group's score is the sum of this many of its best experts' scores.
    is_normed: bool = True  # Whether the weights of a token's experts are normalised to sum to 1.
    scale: float = 1.0  # Factor of the weights after normalisation.
    scales_input: bool = False  # Whether weights multiply the experts' inputs instead of their outputs (Llama 4).


SOFTMAX_ROUTING = Routing()
"""Routing by a softmax over the chosen logits (Mixtral, arXiv:2401.04088, section 2.1)."""


@dataclass(frozen=True, kw_only=True)
class Dispatch:
    """Top-k routing: send rows of `source` to `num_experts` experts, chosen by the router's logits `router`.

    capacity_factor, num_padding: as in `Experts` (`padding`). Without a factor no token is dropped.
    """

    source: str
    router: str
    target: str
    num_experts: int
    num_active: int
    capacity_factor: float | None = None
    routing: Routing = SOFTMAX_ROUTING
    num_padding: int = 0

    @property
    def num_stored(self) -> int:
        """The number of experts in the arrays of their weights."""
        return self.num_experts + self.num_padding


@dataclass(frozen=True, kw_only=True)
class Combine:
    """Return experts' rows to their tokens, weighted by the routing and summed."""

    source: str
    target: str


@dataclass(frozen=True, kw_only=True)
class SigmoidGate:
    """Multiply `source` by the sigmoid of `by`: of the same shape, or one logit of each token [batch, sequence, 1]."""

    source: str
    by: str
    target: str


@dataclass(frozen=True, kw_only=True)
class Add:
    """Add values to the residual stream, with the strategy's dropout."""

    sources: tuple[str, ...]
    target: str = STREAM
    scale: float = 1.0  # Factor of their sum.


@dataclass(frozen=True, kw_only=True)
class Slice:
    """A slice of the last dim of `source`: `size` elements from `start`."""

    source: str
    target: str
    start: int
    size: int


@dataclass(frozen=True, kw_only=True)
class Concat:
    """Concatenate values along their last dim; a value without heads is repeated for every head."""

    sources: tuple[str, ...]
    target: str


LayerOp = (
    Norm | Linear | Rotary | Attention | GatedDelta | Gated | Dispatch | Combine | SigmoidGate | Add | Slice | Concat
)


@dataclass(frozen=True, kw_only=True)
class Lookup:
    """Rows of the table `name` [rows, columns] at integer ids, added to the residual stream."""

    name: str
    rows: tuple[str, int]
    columns: tuple[str, int]
    target: str = STREAM
    is_positional: bool = False  # Whether ids are positions; every device then holds the whole table.
    init_scale: float = 1.0  # Standard deviation at initialisation.
    multiplier: float = 1.0  # Factor of the rows.
    is_tied: bool = False  # Whether the table is the unembedding too.
    low_rank: LowRank | None = None


@dataclass(frozen=True, kw_only=True)
class CrossEntropy:
    """Mean cross-entropy in nats of the logits `source` and integer targets; a split vocab is reduced, never gathered.

    scale, softcap: logits are multiplied by scale, then softcap * tanh(logits / softcap).
    """

    source: str
    softcap: float | None = None
    scale: float = 1.0


@dataclass(frozen=True, kw_only=True)
class DotProduct:
    """Matmul of every row of `left` with every row of `right` in a batch, over `size` elements.

    The logits of retrieval and contrastive models, with the batch's rows as classes. `right` is gathered over the axes
    that split the batch; its rows stay split over tp like a vocab.
    """

    name: str
    left: str
    right: str
    target: str
    size: int


EndOp = Lookup | Norm | Linear | DotProduct | CrossEntropy
"""An op before or after the layers."""


@dataclass(frozen=True, kw_only=True)
class Block:
    """A part of a layer that adds to the residual stream: the ops from its norm to its `Add`, under one named scope."""

    name: Literal["attention", "mlp", "block"]
    ops: tuple[LayerOp, ...] = ()

    @property
    def num_additions(self) -> int:
        """Number of outputs added to the stream: 2 if attention and MLP run in parallel in one block, else 1."""
        return 2 if self.name == "block" else 1


@dataclass(frozen=True, kw_only=True)
class Stack:
    """`num_layers` layers of one kind, whose parameters are stacked."""

    # `layers`, `dense_layers` (dense layers before MoE layers) or another name. The first two are also logical axes of
    # the stacked dim; for other names that axis is `layers`.
    name: str
    num_layers: int
    blocks: tuple[Block, ...]
    # Whether its layers alternate with those of the stacks before it: one layer of each in turn, in as many cycles as
    # each has layers. The first of such stacks is not marked.
    is_alternating: bool = False

    @property
    def ops(self) -> tuple[LayerOp, ...]:
        """The ops of one layer in order."""
        return tuple(op for block in self.blocks for op in block.ops)

    @property
    def period(self) -> int:
        """Number of layers after which windows and rotary frequencies repeat; 1 if all layers are alike."""
        cycles = [len(op.windows) for op in self.ops if isinstance(op, Attention)]
        cycles += [len(op.by_layer) for op in self.ops if isinstance(op, Rotary | Norm)]
        return math.lcm(*cycles)

    def layer(self, number: int) -> Stack:
        """Return layer `number` as a stack of one layer, with its own window and frequencies."""

        def own(op: LayerOp) -> LayerOp:
            match op:
                case Attention():
                    return replace(op, windows=(op.windows[number % len(op.windows)],))
                case Rotary() | Norm():
                    return replace(op, by_layer=(op.by_layer[number % len(op.by_layer)],))
                case _:
                    return op

        blocks = tuple(replace(block, ops=tuple(map(own, block.ops))) for block in self.blocks)
        return replace(self, num_layers=1, blocks=blocks)


@dataclass(frozen=True, kw_only=True)
class Program:
    """A model's forward pass: its embedding, its stacks of layers, and the logits with their loss."""

    embedding: tuple[EndOp, ...]
    stacks: tuple[Stack, ...]
    logits: tuple[EndOp, ...]


def alternating(stacks: Iterable[Stack]) -> tuple[tuple[Stack, ...], ...]:
    """Return the stacks in groups, one after the other; the layers of a group's stacks alternate."""
    groups: list[tuple[Stack, ...]] = []
    for stack in stacks:
        if stack.is_alternating:
            groups[-1] = (*groups[-1], stack)
        else:
            groups.append((stack,))
    return tuple(groups)


def shortest_cycle(by_layer: Iterable[T]) -> tuple[T, ...]:
    """Return the shortest sequence that, repeated and cut after the last layer, has the value of each layer.

    by_layer: the values of all layers. Those of a cycle do not do, because the repetition may be cut within it.
    """
    every = tuple(by_layer)
    return next(every[:size] for size in range(1, len(every) + 1) if every[size:] == every[:-size])


def of_layers(cycle: tuple[T, ...], layers: range) -> tuple[T, ...]:
    """Return the value of each of these layers, in a cycle that starts at layer 0."""
    return tuple(cycle[layer % len(cycle)] for layer in layers)
