"""The vocabulary a model is written in: the ops of a layer over named values, and the parameters that they declare.

An op reads values by name and writes one. `STREAM` is the residual stream [batch, sequence, embed]; it is where a layer
starts and what it returns. Shapes are of one layer; a `Stack` repeats its ops over layers and stacks their parameters.
The same ops give parameters, forward pass, flops, communication and memory (`step.passes`, `models`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

from meshwright.step.frequencies import Frequencies

STREAM = "stream"
"""The name of the residual stream."""

Activation = Literal["silu", "gelu", "gelu_tanh", "relu"]
NormKind = Literal["rms", "layer"]

Dims = tuple[tuple[str, int], ...]
"""Dims as (logical axis, size)."""

HEADS = ("kv_heads", "group", "head_dim")
"""The dims of queries: heads grouped by the kv head they share, so that splitting kv_heads splits both alike."""


@dataclass(frozen=True, kw_only=True)
class Norm:
    """RMSNorm or LayerNorm of `source` over its last dim, of `size` elements; its scale is the parameter `name`.

    dims: the last dims of `source` where several are normed together, of `size` elements in all (OLMo 2: all heads);
    what splits them splits the scale, and squares are summed over it. offset: added to the scale (Gemma stores it minus
    1). has_bias: a parameter `{name}_bias` is added.
    """

    name: str
    source: str
    target: str
    size: int
    dims: Dims = ()
    kind: NormKind = "rms"
    epsilon: float = 1e-5
    offset: float = 0.0
    has_bias: bool = False


@dataclass(frozen=True, kw_only=True)
class LowRank:
    """A branch of low rank beside a product (LoRA, arXiv:2106.09685): scale * B A x is added to it.

    A is the parameter `{name}_lora_a` [*inputs, rank], B is `{name}_lora_b` [rank, *outputs]. dropout: the share of
    what A reads that a train step drops at random.
    """

    rank: int
    scale: float
    dropout: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Linear:
    """The product of `source` with the weight `name`, whose dims are `inputs` (summed) followed by `outputs`.

    For experts the weight has the dim `expert` of `num_experts` before them, and `source` are the rows of each expert
    (`Dispatch`). init_scale: the standard deviation at initialisation; 1 / sqrt(fan in) where None. has_bias: a
    parameter `{name}_bias` with the dims `outputs` is added. is_rounded: whether a strategy with 8-bit products rounds
    its operands. is_on_residual: whether it multiplies the stream as it is stored between blocks, in float32 and
    without gathering it over tp; a router does. is_tied: whether the weight is the embedding table, declared by its
    `Lookup`, with the dims `outputs` first. low_rank: the branch beside it, if any.
    """

    name: str
    source: str
    target: str
    inputs: Dims
    outputs: Dims
    num_experts: int = 0
    init_scale: float | None = None
    has_bias: bool = False
    is_rounded: bool = True
    is_on_residual: bool = False
    is_tied: bool = False
    low_rank: LowRank | None = None

    @property
    def bias_dims(self) -> Dims:
        """The logical axis and the size of each dim of its bias, kept whole along the stream as scales of norms are."""
        experts = (("expert", self.num_experts),) if self.num_experts else ()
        return *experts, *(("norm" if name == "embed" else name, size) for name, size in self.outputs)

    @property
    def fan_in(self) -> int:
        """The elements summed for each element of the result."""
        return math.prod(size for _, size in self.inputs)


@dataclass(frozen=True, kw_only=True)
class Rotary:
    """Rotary position embedding (arXiv:2104.09864) of some values in place: queries and keys.

    size: the dims of a head that are rotated, from `start`; the rest of a head is left as it is (GPT-NeoX rotates
    the first quarter). Of an odd size one dim more is rotated, by frequencies that are those of the odd size.
    by_layer: the frequencies of each layer of the stack in a cycle; one entry where all layers are alike.
    is_interleaved: whether pairs of dims that are rotated together stand side by side, as DeepSeek's do, and not
    half of the dims apart.
    """

    values: tuple[str, ...]
    size: int
    by_layer: tuple[Frequencies, ...]
    start: int = 0
    is_interleaved: bool = False


@dataclass(frozen=True, kw_only=True)
class LatentKeys:
    """What a server keeps of a token in place of keys and values (DeepSeek-V2, arXiv:2405.04434, section 2.1).

    latent, rotary: the value that keys and values are products of, and the part of every head's key beside it.
    key_weight, value_weight: the weights of these products.
    """

    latent: str
    rotary: str
    key_weight: str
    value_weight: str


@dataclass(frozen=True, kw_only=True)
class Attention:
    """Causal attention of `query` over `key` and `value`, grouped by kv heads.

    qk_dim, value_dim: the dims of a head. windows: how many keys a query may attend to, of each layer in a cycle; None
    for all before it. softcap: scores are softcap * tanh(scores / softcap). scale: what scores are multiplied by;
    1 / sqrt(qk_dim) where None. latent: what keys and values are made of, where a server keeps that. has_sinks: each
    head has a learned logit, the parameter `sinks` [kv_heads, group], that takes a share of every softmax and adds no
    value (arXiv:2309.17453).
    """

    query: str
    key: str
    value: str
    target: str
    num_heads: int
    num_kv_heads: int
    qk_dim: int
    value_dim: int
    windows: tuple[int | None, ...] = (None,)
    softcap: float | None = None
    scale: float | None = None
    has_alibi: bool = False
    has_sinks: bool = False
    latent: LatentKeys | None = None


@dataclass(frozen=True, kw_only=True)
class ClampedSwiglu:
    """gate sigmoid(alpha gate) (up + 1), gate at most `limit`, up within +-limit (gpt-oss, arXiv:2508.10925)."""

    alpha: float = 1.702
    limit: float = 7.0


@dataclass(frozen=True, kw_only=True)
class Gated:
    """An MLP's activation: function(gate) * up, or function(source) where there is one source.

    width: the dims of its result, over all devices. clamped: instead of the function, where there is one.
    """

    sources: tuple[str, ...]
    target: str
    function: Activation = "silu"
    width: int = 0
    clamped: ClampedSwiglu | None = None


@dataclass(frozen=True, kw_only=True)
class Routing:
    """How a router's logits choose the experts of a token, and how much each of them counts.

    Args:
        scores: of an expert, from its logit: a softmax over all experts, or a sigmoid of each (DeepSeek-V3,
            arXiv:2412.19437, section 2.1.2).
        has_choice_bias: the parameter `choice_bias` is added to the scores for the choice, and changes no share. It
            has no gradient.
        num_groups, num_active_groups: the groups of experts, equal in size, and those that a token may choose from
            (DeepSeek-V2, arXiv:2405.04434, section 2.2.2).
        group_score: how many of its best scores count for a group, as a sum.
        is_normed: whether the shares of a token's experts sum to 1 before they are scaled.
        scale: what shares are multiplied by.
    """

    scores: Literal["softmax", "sigmoid"] = "softmax"
    has_choice_bias: bool = False
    num_groups: int = 1
    num_active_groups: int = 1
    group_score: int = 1
    is_normed: bool = True
    scale: float = 1.0


SOFTMAX_ROUTING = Routing()
"""A softmax over the chosen logits (Mixtral, arXiv:2401.04088, section 2.1)."""


@dataclass(frozen=True, kw_only=True)
class Dispatch:
    """Top-k routing: the rows of `source` that each of `num_experts` works on, by the router's logits `router`.

    capacity_factor: as in `Experts`; None where no token is dropped.
    """

    source: str
    router: str
    target: str
    num_experts: int
    num_active: int
    capacity_factor: float | None = None
    routing: Routing = SOFTMAX_ROUTING


@dataclass(frozen=True, kw_only=True)
class Combine:
    """Rows of experts back to their tokens, added up by the routing's shares."""

    source: str
    target: str


@dataclass(frozen=True, kw_only=True)
class SigmoidGate:
    """`source` [batch, sequence, embed] times the sigmoid of its token's one logit `by` [batch, sequence, 1]."""

    source: str
    by: str
    target: str


@dataclass(frozen=True, kw_only=True)
class Add:
    """Add values to the residual stream (with dropout where a strategy has it)."""

    sources: tuple[str, ...]
    target: str = STREAM


@dataclass(frozen=True, kw_only=True)
class Slice:
    """Part of the last dim of `source`, from `start`, of `size` elements: a latent beside the keys' rotary part."""

    source: str
    target: str
    start: int
    size: int


@dataclass(frozen=True, kw_only=True)
class Concat:
    """Values side by side along their last dim; one without heads is the same for every head."""

    sources: tuple[str, ...]
    target: str


LayerOp = Norm | Linear | Rotary | Attention | Gated | Dispatch | Combine | SigmoidGate | Add | Slice | Concat


@dataclass(frozen=True, kw_only=True)
class Lookup:
    """Rows of the table `name` [rows, columns] at integer ids, onto the residual stream.

    is_positional: rows are looked up by position and added, and every device has all of them. init_scale: the standard
    deviation at initialisation. multiplier: what rows are multiplied by. is_tied: whether the table is the unembedding
    too.
    """

    name: str
    rows: tuple[str, int]
    columns: tuple[str, int]
    target: str = STREAM
    is_positional: bool = False
    init_scale: float = 1.0
    multiplier: float = 1.0
    is_tied: bool = False


@dataclass(frozen=True, kw_only=True)
class CrossEntropy:
    """The mean loss in nats of logits `source` for integer targets; a split vocab is summed over, never gathered.

    softcap: logits are softcap * tanh(logits / softcap).
    """

    source: str
    softcap: float | None = None


@dataclass(frozen=True, kw_only=True)
class DotProduct:
    """The product of every row of `left` with every row of `right` in a batch, over `size` elements.

    The logits of retrieval and contrastive models, whose targets are the other rows of the batch: `right` is gathered
    over what splits the batch, and its rows stay split over tp, as a vocab is.
    """

    name: str
    left: str
    right: str
    target: str
    size: int


EndOp = Lookup | Norm | Linear | DotProduct | CrossEntropy
"""What stands before and after the layers."""


@dataclass(frozen=True, kw_only=True)
class Block:
    """A part of a layer that adds to the residual stream: the ops from its norm to its `Add`, under one named scope."""

    name: Literal["attention", "mlp", "block"]
    ops: tuple[LayerOp, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Stack:
    """`num_layers` layers of one kind, whose parameters are stacked.

    name: also the logical axis of the stacked dim, where it is `layers` or `dense_layers` (before experts'); the layers
    of a stack with another name are stacked along `layers`.
    """

    name: str
    num_layers: int
    blocks: tuple[Block, ...]

    @property
    def ops(self) -> tuple[LayerOp, ...]:
        """The ops of one layer in order."""
        return tuple(op for block in self.blocks for op in block.ops)

    @property
    def period(self) -> int:
        """The number of layers after which windows and rotary frequencies repeat; 1 where all layers are alike."""
        cycles = [len(op.windows) for op in self.ops if isinstance(op, Attention)]
        cycles += [len(op.by_layer) for op in self.ops if isinstance(op, Rotary)]
        return math.lcm(*cycles)

    def layer(self, number: int) -> Stack:
        """One layer of the stack by itself, with its own window and frequencies."""

        def own(op: LayerOp) -> LayerOp:
            match op:
                case Attention():
                    return replace(op, windows=(op.windows[number % len(op.windows)],))
                case Rotary():
                    return replace(op, by_layer=(op.by_layer[number % len(op.by_layer)],))
                case _:
                    return op

        blocks = tuple(replace(block, ops=tuple(map(own, block.ops))) for block in self.blocks)
        return replace(self, num_layers=1, blocks=blocks)


@dataclass(frozen=True, kw_only=True)
class Program:
    """A model's forward pass: what is before its layers, its stacks of layers, and what makes the loss of them."""

    embedding: tuple[EndOp, ...]
    stacks: tuple[Stack, ...]
    logits: tuple[EndOp, ...]
