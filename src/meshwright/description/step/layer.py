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

SHARED_KEY, SHARED_VALUE = "shared_key", "shared_value"
"""The names of an earlier layer's keys and values (`Attention.is_sharing`)."""

Activation = Literal["silu", "gelu", "gelu_tanh", "relu", "relu2"]
NormKind = Literal["rms", "layer"]

T = TypeVar("T")

Dims = tuple[tuple[str, int], ...]
"""Dims as (logical axis, size)."""

HEADS = ("kv_heads", "group", "head_dim")
"""Logical axes of queries. Heads are grouped by the kv head that they share: splitting kv_heads splits them too."""


LINEAR_HEADS = "linear_heads"
"""Logical axis of the query and key heads of linear attention, which are neither padded nor copied."""

DELTA_CHUNK = 64
"""Tokens in a chunk of the gated delta rule; sequences are padded to whole chunks."""


def vector_dims(outputs: Dims) -> Dims:
    """Return the dims of a vector with an element for each output of a matmul, such as a bias.

    The logical axis `embed` becomes `norm`, because such vectors are stored whole, like a norm's scale.
    """
    return tuple(("norm" if name == "embed" else name, size) for name, size in outputs)


@dataclass(frozen=True, kw_only=True)
class Norm:
    """RMSNorm or LayerNorm of `source` over its last dim, of `size` elements. Its scale is the parameter `name`."""

    name: str
    source: str
    target: str
    size: int
    # Dims of `source` that are normalised together, with `size` elements in all (OLMo 2: all heads); empty for the last
    # dim. The mesh axes of these dims split the scale, and the squares are summed over them.
    dims: Dims = ()
    kind: NormKind = "rms"
    epsilon: float = 1e-5
    offset: float = 0.0  # Added to the scale (Gemma stores it minus 1).
    has_bias: bool = False  # Whether the parameter `{name}_bias` is added.
    factor: float = 1.0  # Factor of the result.
    has_scale: bool = True  # False: an RMSNorm without parameters (Llama 4's queries and keys).
    by_layer: tuple[bool, ...] = (True,)  # For each layer of a repeating cycle, whether it has the norm.


@dataclass(frozen=True, kw_only=True)
class LowRank:
    """A LoRA branch beside a matmul (arXiv:2106.09685) that adds scale * B A x.

    A is the parameter `{name}_lora_a` [*inputs, *dims], B is `{name}_lora_b` [*dims, *outputs]. Beside a lookup, A x is
    a lookup of A's rows.

    has_magnitude: whether it is DoRA (arXiv:2402.09353), which multiplies the sum of matmul and branch by m / n for
    each output, before the bias. m is the parameter `{name}_lora_m` [*outputs], and n the norm of the output's column
    of W + scale * A B. n has no gradient (section 4.3).
    """

    rank: int
    scale: float
    dropout: float = 0.0  # Probability of dropping an element of A's input in a train step.
    slots: int = 0  # Adapters of a server, of which each row of a step uses one or none; 0: one adapter for all tokens.
    has_magnitude: bool = False

    @property
    def dims(self) -> Dims:
        """The dims between A and B: (slots, rank), or only the rank without slots."""
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
    # Whether the input has the layout of the residual stream between blocks and is not gathered over tp. The results of
    # routers are in float32.
    is_on_residual: bool = False
    # Whether frameworks that fuse queries, keys and values into one array store this weight there, after the queries.
    is_fused: bool = False
    is_tied: bool = False  # Whether the weight is the embedding table that a `Lookup` declares, [*outputs, *inputs].
    low_rank: LowRank | None = None

    @property
    def branch(self) -> str:
        """The name of the matmul's low-rank branch. A tied unembedding has its own one, beside that of the lookup."""
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
    # Number of dims of a head that are rotated, from `start`; the others are unchanged (GPT-NeoX rotates a quarter). If
    # it is odd, one more dim is rotated, with the frequencies of the odd number.
    size: int
    # Frequencies of each layer, as a repeating cycle.
    by_layer: tuple[Frequencies, ...]
    start: int = 0
    is_interleaved: bool = False  # Rotate pairs of adjacent dims (DeepSeek) instead of dims half the size apart.


@dataclass(frozen=True, kw_only=True)
class LatentKeys:
    """Names of the values that a server caches instead of keys and values (DeepSeek-V2, arXiv:2405.04434, 2.1)."""

    latent: str  # Value from which keys and values are computed.
    rotary: str  # The part of a key that all heads share, with rotary embedding.
    key_weight: str  # Weight that computes keys from the latent.
    value_weight: str  # Weight that computes values from the latent.


@dataclass(frozen=True, kw_only=True)
class Attention:
    """Causal attention of `query` over `key` and `value`, grouped by kv heads."""

    query: str
    key: str
    value: str
    target: str
    num_heads: int
    num_kv_heads: int
    qk_dim: int  # Dims of a query and of a key.
    value_dim: int
    # Keys that a query attends to, for each layer of a repeating cycle; None: all before it.
    windows: tuple[int | None, ...] = (None,)
    is_chunked: bool = False  # Whether a window is a chunk of the sequence (`AttentionConfig`).
    softcap: float | None = None  # Scores become softcap * tanh(scores / softcap).
    scale: float | None = None  # Factor of the scores; None: 1 / sqrt(qk_dim).
    has_alibi: bool = False
    # Whether each head has a learned logit without a value in every softmax: the parameter `sinks` [kv_heads, group]
    # (arXiv:2309.17453).
    has_sinks: bool = False
    is_sharing: bool = False  # Whether keys and values are those of an earlier layer (`Stack.is_donor`).
    latent: LatentKeys | None = None  # The values that a server caches instead of keys and values, if any.


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
    target: str  # Has the shape of the values.
    num_heads: int  # Number of query heads, and of key heads.
    group: int  # Value heads that share a query and key head.
    key_dim: int
    value_dim: int
    taps: int

    @property
    def convolved(self) -> tuple[tuple[str, str, Dims], ...]:
        """Each value that is convolved, as (parameter of the convolution, value, dims of the value's channels)."""
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
    """The activation of an MLP: function(gate) * up for two sources, or function(source) for one."""

    sources: tuple[str, ...]
    target: str
    function: Activation | ClampedSwiglu = "silu"
    width: int = 0  # Dims of the result over all devices.
    sparsity: float = 0.0  # About the share of the gates that a cutoff sets to zero (Gemma 3n); 0: none.
    is_on_residual: bool = False  # Whether the sources have the tokens of the residual stream between blocks.


@dataclass(frozen=True, kw_only=True)
class Routing:
    """How the router's logits choose experts for a token and weight them."""

    # Score of an expert: softmax over all experts, sigmoid of each logit (DeepSeek-V3, arXiv:2412.19437, section
    # 2.1.2), or a softmax over those with near logits that were not chosen before it (arXiv:2409.12136).
    scores: Literal["softmax", "sigmoid", "sparsemixer"] = "softmax"
    tolerance: float = 0.0  # Sparse mixer: how far a near logit may be below the chosen one, as a share of the larger.
    # Whether the parameter `choice_bias` is added to the scores that choose experts, but not to the weights. It has no
    # gradient.
    has_choice_bias: bool = False
    num_groups: int = 1  # Equal groups of experts (DeepSeek-V2, arXiv:2405.04434, section 2.2.2).
    num_active_groups: int = 1  # Groups that a token may choose from.
    group_score: int = 1  # A group's score is the sum of this many of its best experts' scores.
    is_normed: bool = True  # Whether the weights of a token's experts are normalised to sum to 1.
    scale: float = 1.0  # Factor of the weights after normalisation.
    # Whether the weight of an expert is multiplied by its element of the parameter `expert_scale` (Gemma 4).
    has_expert_scale: bool = False
    scales_input: bool = False  # Whether weights multiply the experts' inputs instead of their outputs (Llama 4).


SOFTMAX_ROUTING = Routing()
"""Routing by a softmax over the chosen logits (Mixtral, arXiv:2401.04088, section 2.1)."""


@dataclass(frozen=True, kw_only=True)
class Dispatch:
    """Top-k routing: send each token's row of `source` to `num_active` of `num_experts` experts.

    The experts are chosen by the router's logits, the value named `router`.

    capacity_factor: as in `Experts`; None: no token is dropped. num_padding: `Experts.padding`.
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
    """Send the experts' output rows back to their tokens, and sum them weighted by the routing."""

    source: str
    target: str


@dataclass(frozen=True, kw_only=True)
class SigmoidGate:
    """Multiply `source` by the sigmoid of `by`, of the same shape or with one logit per token [batch, sequence, 1]."""

    source: str
    by: str
    target: str


@dataclass(frozen=True, kw_only=True)
class Add:
    """Add values to the residual stream, with the strategy's dropout."""

    sources: tuple[str, ...]
    target: str = STREAM  # Another name: the sum of the values alone, without dropout.
    scale: float = 1.0  # Factor of their sum.
    factor: float = 1.0  # Factor of the stream after it.
    # Whether the stream is then multiplied by the parameter `layer_scale` [1], which has no gradient (Gemma 4).
    has_layer_scale: bool = False


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


@dataclass(frozen=True, kw_only=True)
class Mix:
    """A step of AltUp over all streams (`step.layer_inputs`). `source` has a logit of each, or is added to others."""

    kind: Literal["predict", "correct", "add"]
    source: str
    num_streams: int
    size: int = 0  # Elements of a stream.


LayerOp = Mix | (
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
    """Mean cross-entropy in nats of the logits `source` and integer targets. A split vocab is never gathered.

    scale, softcap: logits are multiplied by scale, then softcap * tanh(logits / softcap).
    """

    source: str
    softcap: float | None = None
    scale: float = 1.0


@dataclass(frozen=True, kw_only=True)
class DotProduct:
    """Logits of a retrieval or contrastive model: every row of `left` times every row of `right` in a batch.

    The rows of the batch are the classes. A row has `size` elements. `right` is gathered over the axes that split the
    batch; its rows stay split over tp like a vocab.
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

    name: Literal["attention", "mlp", "block", "layer_input", "predict"]
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
    # Whether its layers alternate with those of the stacks before it: the model runs one layer of each stack, then the
    # next layer of each, and so on. False for the first of such stacks.
    is_alternating: bool = False
    # Whether layers of later stacks attend to the keys and values of its layer (`Attention.is_sharing`): those without
    # keys and values of their own that have the same window.
    is_donor: bool = False

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

    @property
    def window(self) -> int | None:
        """The attention window of its layers, which all have the same one, in tokens; None for all earlier tokens."""
        (window,) = {window for op in self.ops if isinstance(op, Attention) for window in op.windows}
        return window

    @property
    def is_sharing(self) -> bool:
        """Whether its layers attend to keys and values of an earlier layer."""
        return any(op.is_sharing for op in self.ops if isinstance(op, Attention))

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
    """A model's forward pass: its embedding, its stacks of layers, and the logits with their loss.

    layer_inputs: the ops after the embedding that compute an input of its own for each layer (`step.layer_inputs`).
    widening, narrowing: the matmuls that make AltUp's other streams before the layers, and read them after.
    """

    embedding: tuple[EndOp, ...]
    stacks: tuple[Stack, ...]
    logits: tuple[EndOp, ...]
    layer_inputs: tuple[EndOp, ...] = ()
    widening: tuple[Linear, ...] = ()
    narrowing: tuple[Linear, ...] = ()


def alternating(stacks: Iterable[Stack]) -> tuple[tuple[Stack, ...], ...]:
    """Return the stacks in groups. Groups run one after another; the layers of a group's stacks alternate."""
    groups: list[tuple[Stack, ...]] = []
    for stack in stacks:
        if stack.is_alternating:
            groups[-1] = (*groups[-1], stack)
        else:
            groups.append((stack,))
    return tuple(groups)


def shortest_cycle(by_layer: Iterable[T]) -> tuple[T, ...]:
    """Return the shortest sequence that gives the value of each layer when it is repeated and cut after the last layer.

    by_layer: the value of every layer of the model.
    """
    every = tuple(by_layer)
    return next(every[:size] for size in range(1, len(every) + 1) if every[size:] == every[:-size])


def of_layers(cycle: tuple[T, ...], layers: range) -> tuple[T, ...]:
    """Return the value of each of these layers. cycle: the values of layers 0, 1, ..., which repeat."""
    return tuple(cycle[layer % len(cycle)] for layer in layers)
