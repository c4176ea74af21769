"""A model's configuration: sizes and features. `step.blocks` turns it into ops."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any, Literal

from meshwright.description.step.attention import (
    FullHeads,
    KeySharing,
    LatentAttention,
    LinearAttention,
    check_full_heads,
    check_sharing,
)
from meshwright.description.step.frequencies import (
    DynamicRopeScaling,
    Frequencies,
    LongRopeScaling,
    RopeScaling,
    YarnRopeScaling,
)
from meshwright.description.step.layer import (
    SOFTMAX_ROUTING,
    Activation,
    ClampedSwiglu,
    Gated,
    Lookup,
    NormKind,
    Program,
    Routing,
    Stack,
    of_layers,
)
from meshwright.description.step.layer_inputs import AltUp, LayerInputs, check_altup
from meshwright.description.step.lora import LoRA
from meshwright.errors import MeshwrightError
from meshwright.support.field_types import check_fields

SIZES = ("num_layers", "embed", "mlp", "num_heads", "num_kv_heads", "head_dim", "vocab")
"""Model fields that must be whole numbers of at least 1."""

ABOVE_ZERO = (
    "norms.epsilon",
    *("scales.embedding", "scales.residual", "scales.attention", "scales.attention_softcap"),
    *("scales.logits", "scales.logits_softcap"),
)
"""Model fields that must be above 0, or None."""


def largest(field: str) -> int:
    """Return the largest value allowed for a size; a search over larger sizes would take too long."""
    return {"num_layers": 10**4, "seq_len": 10**8, "prompt_len": 10**8, "output_len": 10**8}.get(field, 10**9)


MAX_CAPACITY_FACTOR = 10_000
"""Largest capacity factor. If the factor is at least the number of experts, no token is dropped."""


@dataclass(frozen=True, kw_only=True)
class Experts:
    """A mixture of experts instead of the MLP: `num_active` of `count` MLPs of width `mlp` process each token."""

    count: int
    num_active: int
    mlp: int
    # Width of the shared MLP, which works on every token (several shared experts count as one wide one); 0: none.
    shared_mlp: int = 0
    has_shared_gate: bool = False  # Whether a sigmoid gate per token scales the shared MLP's output (Qwen2-MoE).
    # Whether experts are beside the dense MLP of a layer, and router, experts and MLP each have norms (Gemma 4).
    are_beside_mlp: bool = False
    has_bias: bool = False  # Whether router and experts have biases (gpt-oss).
    num_dense_layers: int = 0  # Number of first layers, which have a dense MLP.
    # For each layer after the dense ones, whether it has experts (else a dense MLP), as a cycle that repeats.
    layers: tuple[bool, ...] = (True,)
    # Slots of an expert divided by its tokens at even load; excess tokens are dropped. None: no token is dropped.
    capacity_factor: float | None = None
    balance_weight: float = 0.01  # Weight of the load balancing loss (Switch, arXiv:2101.03961, section 2.2).
    routing: Routing = SOFTMAX_ROUTING  # How a token's experts are chosen.
    padding: int = 0  # Experts of zeros that a mesh stores beyond `count`, and no token chooses (`step.padding`).

    def __post_init__(self) -> None:
        for field, least in (("count", 1), ("num_active", 1), ("mlp", 1), ("shared_mlp", 0), ("num_dense_layers", 0)):
            if (value := getattr(self, field)) < least:
                raise MeshwrightError(f"experts have {field}={value}; it takes a whole number from {least}")
        if not any(self.layers):
            raise MeshwrightError(f"experts have layers={self.layers!r}; a cycle has at least one layer with experts")
        if self.num_active > self.count:
            raise MeshwrightError(
                f"{self.num_active} active of {self.count} experts; the active are from 1 to all of them"
            )
        if self.capacity_factor is not None and not 0 < self.capacity_factor <= MAX_CAPACITY_FACTOR:
            raise MeshwrightError(
                f"experts have capacity_factor={self.capacity_factor:g}; it is above 0 and at most"
                f" {MAX_CAPACITY_FACTOR:,}, or None where no token is dropped"
            )
        if self.balance_weight < 0:
            raise MeshwrightError(f"experts have balance_weight={self.balance_weight:g}; it is from 0")
        if self.are_beside_mlp and self.shared_mlp:
            raise MeshwrightError(f"experts beside an MLP have shared_mlp={self.shared_mlp}; the MLP has all tokens")
        if self.has_shared_gate and not self.shared_mlp:
            raise MeshwrightError("experts have has_shared_gate=True and shared_mlp=0; there is nothing to gate")
        groups, active, best = self.routing.num_groups, self.routing.num_active_groups, self.routing.group_score
        if groups < 1 or self.count % groups:
            raise MeshwrightError(f"{self.count} experts in num_groups={groups} groups; a number that divides them")
        size = self.count // groups
        if not 1 <= active <= groups or active * size < self.num_active:
            raise MeshwrightError(
                f"a token chooses {self.num_active} experts from num_active_groups={active} of {groups} groups of"
                f" {size}; take from {-(-self.num_active // size)} to {groups}"
            )
        if not 1 <= best <= size:
            raise MeshwrightError(f"group_score={best} counts the best of a group of {size} experts; 1 to {size}")

    def are_in(self, layer: int) -> bool:
        """Whether a layer, counted from 0, has experts."""
        after = layer - self.num_dense_layers
        return after >= 0 and self.layers[after % len(self.layers)]

    @property
    def num_stored(self) -> int:
        """The number of experts in the arrays of their weights."""
        return self.count + self.padding

    def padded(self, ep: int) -> Experts:
        """Return the experts padded until `ep` divides those that are stored; unchanged if `ep` is above `count`."""
        padding = -self.count % ep if ep <= self.count else 0
        return self if padding == self.padding else replace(self, padding=padding)

    def slots(self, tokens: int) -> int:
        """Return the slots of each expert for the `tokens` tokens of one device, rounded up.

        They are an expert's tokens at even load times the capacity factor (1 if it is None).
        """
        return math.ceil((self.capacity_factor or 1.0) * tokens * self.num_active / self.count)

    def max_copies(self, tokens: int, ep: int) -> int:
        """Return the maximum number of token copies that a device with `tokens` tokens can send to one of `ep` devices.

        A token has `num_active` copies, at most one for each expert of that device.
        """
        return tokens * min(self.num_active, self.num_stored // ep)


@dataclass(frozen=True, kw_only=True)
class Biases:
    """Matmuls that have biases."""

    qkv: bool = False
    output: bool = False  # The output projection of attention.
    mlp: bool = False
    unembedding: bool = False  # An untied unembedding (Phi).


@dataclass(frozen=True, kw_only=True)
class Norms:
    """The norms of a model: of its blocks, of the final residual stream, and of queries and keys."""

    kind: NormKind = "rms"
    has_bias: bool = False
    offset: float = 0.0  # Added to the scale of every norm; 1 if checkpoints store scales minus 1 (Gemma).
    epsilon: float = 1e-5
    # Where the norms of blocks are: on the residual stream before each block, on each block's output before it is added
    # (OLMo 2), or both (Gemma 2).
    place: Literal["before", "after", "both"] = "before"
    after_embedding: bool = False  # Whether there is a norm after the embedding (BLOOM).

    @property
    def is_before(self) -> bool:
        """Whether the residual stream has a norm before each block."""
        return self.place != "after"

    @property
    def is_after(self) -> bool:
        """Whether each block's output has a norm before it is added."""
        return self.place != "before"


@dataclass(frozen=True, kw_only=True)
class AttentionConfig:
    """Features of a model's attention: windows, norms, sinks, gates, and latent or linear attention."""

    # Keys that a query attends to, its own included, for each layer of a repeating cycle; None: all before it.
    windows: tuple[int | None, ...] = (None,)
    # Whether a window is a chunk: the sequence is cut into chunks of this size, and a query attends to keys of its own.
    is_chunked: bool = False
    # Norm of queries and keys. `head`: of each head (Qwen3). `all heads`: over all heads of a token together (OLMo 2).
    # `rotated head`: of each head after the rotary embedding (Hunyuan). `rotated head, unscaled`: as that, but without
    # a scale and only in layers with rotary embedding (Llama 4).
    qk_norm: Literal["head", "all heads", "rotated head", "rotated head, unscaled"] | None = None
    has_sinks: bool = False  # Whether each head has a learned logit that takes part in its softmax (gpt-oss).
    has_value_norm: bool = False  # Whether each value head has an RMSNorm without a scale (Gemma 4).
    full_heads: FullHeads | None = None
    sharing: KeySharing | None = None
    has_output_gate: bool = False  # Whether a sigmoid gate scales each dim of the heads' outputs (Qwen3-Next).
    latent: LatentAttention | None = None
    linear: LinearAttention | None = None

    @property
    def window(self) -> int | None:
        """The window of the first layer that has one."""
        return next((window for window in self.windows if window is not None), None)


@dataclass(frozen=True, kw_only=True)
class RotaryPositions:
    """Positions by rotary embedding of queries and keys."""

    frequencies: tuple[Frequencies, ...] = (Frequencies(theta=10_000.0),)  # Of each layer, as a cycle that repeats.
    dims: int = 0  # First dims of a head that are rotated; 0: all. Latent attention has its own (`rope_head_dim`).
    is_interleaved: bool = False  # Whether pairs of adjacent dims are rotated (see `step.layer.Rotary`).


@dataclass(frozen=True, kw_only=True)
class LearnedPositions:
    """A table with a learned embedding of each position."""

    rows: int


@dataclass(frozen=True, kw_only=True)
class Scales:
    """Factors by which values are multiplied, and softcaps: with a softcap c, x becomes c * tanh(x / c)."""

    embedding: float = 1.0
    # Whether the stream is multiplied by a stored number after each layer, which does not train (Gemma 4).
    has_layer: bool = False
    residual: float = 1.0  # Factor of each block's output before it is added to the residual stream (Granite).
    attention: float | None = None  # Factor of attention scores; None: 1 / sqrt(head_dim).
    attention_softcap: float | None = None
    logits: float = 1.0  # Factor of the logits before their softcap.
    logits_softcap: float | None = None


@dataclass(frozen=True)
class Family:
    """A family of models: its name, and how the layers of its models are written as ops.

    The layers of most families are built from the features of `ModelConfig` (`step.blocks`); a family with other layers
    overrides `layers`. Plan files store a family's name.
    """

    name: str = "decoder"

    def layers(self, model: ModelConfig) -> tuple[Stack, ...] | None:
        """Return a model's stacks of layers in order, or None if they are a generic decoder's (`step.blocks`)."""
        return None


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A decoder; the defaults are Llama's: grouped-query attention, RoPE, RMSNorm, SwiGLU, no biases."""

    name: str
    num_layers: int
    embed: int
    mlp: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab: int
    family: Family = Family()
    tied_embeddings: bool = False
    gated: bool = True
    activation: Activation | ClampedSwiglu = "silu"
    biases: Biases = Biases()
    norms: Norms = Norms()
    attention: AttentionConfig = AttentionConfig()
    positions: RotaryPositions | LearnedPositions | Literal["alibi"] = RotaryPositions()
    scales: Scales = Scales()
    # Attention and MLP read the same residual stream, so their outputs are summed over devices at once (GPT-J, PaLM).
    # Each has its own norm, or both share one (Command R).
    parallel_blocks: Literal["own norms", "shared norm"] | None = None
    experts: Experts | None = None
    layer_inputs: LayerInputs | None = None
    altup: AltUp | None = None
    lora: LoRA | None = None  # Low-rank adapters, the only parameters that train.
    # Features of the Hugging Face model that cannot run here, and do not change a plan.
    planned_only: tuple[str, ...] = ()

    def __hash__(self) -> int:
        """Hash only the fields that differ most: caches of the search hash models very often."""
        return hash((self.name, self.num_layers, self.embed))

    def __post_init__(self) -> None:
        for part in (self, self.biases, self.norms, self.attention, self.scales):
            check_fields(part)
        for field in SIZES:
            _check_whole(self, field, getattr(self, field))
        for field in ABOVE_ZERO:
            if (value := attrgetter(field)(self)) is not None and value <= 0:
                raise MeshwrightError(f"model {self.name} has {field}={value:g}; it takes a number above 0")
        if self.num_heads % self.num_kv_heads:
            raise MeshwrightError(
                f"model {self.name} has num_heads={self.num_heads} and num_kv_heads={self.num_kv_heads};"
                f" heads are shared evenly, so kv heads must divide heads"
            )
        _check_cycle(self, "attention.windows", self.attention.windows)
        for window in self.attention.windows:
            if window is not None:
                _check_whole(self, "attention.windows", window)
        positions = self.positions
        if isinstance(positions, RotaryPositions):
            _check_rotary(self, positions)
        elif self.attention.latent:
            raise MeshwrightError(
                f"model {self.name} has latent attention, whose keys have rotary positions, and no such"
            )
        elif isinstance(positions, LearnedPositions):
            check_fields(positions)
            _check_whole(self, "positions.rows", positions.rows)
        if full := self.attention.full_heads:
            for field in ("num_kv_heads", "head_dim"):
                _check_whole(self, f"attention.full_heads.{field}", getattr(full, field))
            own, others = self.attention, self.attention.latent or self.attention.linear
            is_known = not (others or own.has_output_gate or (full.are_values_keys and not own.has_value_norm))
            check_full_heads(full, own.windows, name=self.name, num_heads=self.num_heads, is_known=is_known)
        if sharing := self.attention.sharing:
            _check_whole(self, "attention.sharing.mlp", sharing.mlp)
            windows = of_layers(self.attention.windows, range(self.num_layers))
            others = self.experts or self.attention.latent or self.attention.linear or self.parallel_blocks
            check_sharing(sharing, windows, name=self.name, is_known=not others)
        if self.altup:
            own = self.num_layers - sharing.num_layers if sharing else None
            check_altup(
                self.altup, own, name=self.name, has_inputs=self.layer_inputs is not None, norms=self.norms.place
            )
        if self.attention.linear and (self.attention.window or self.attention.latent):
            raise MeshwrightError(
                f"model {self.name} has linear attention, and windows or latent attention in its other layers; they"
                f" attend to all keys and values"
            )
        if (experts := self.experts) and not any(map(experts.are_in, range(self.num_layers))):
            least = experts.num_dense_layers + experts.layers.index(True) + 1
            cycle = "" if all(experts.layers) else f" and layers={experts.layers!r}"
            raise MeshwrightError(
                f"model {self.name} has num_dense_layers={experts.num_dense_layers}{cycle} of"
                f" num_layers={self.num_layers}, which leaves no layer to its experts; use num_layers {least} or more"
            )

    @property
    def with_full_heads(self) -> ModelConfig:
        """The model with the heads of its layers without a window in all layers."""
        full, attention = self.attention.full_heads, self.attention
        if full is None:
            return self
        attention = replace(attention, windows=(None,), full_heads=None)
        return replace(self, num_kv_heads=full.num_kv_heads, head_dim=full.head_dim, attention=attention)

    @property
    def needs_scores(self) -> bool:
        """Whether attention scores must go through memory: no fused kernel supports a softcap or sinks."""
        return self.scales.attention_softcap is not None or self.attention.has_sinks

    @property
    def rope_scalings(self) -> tuple[RopeScaling | None, ...]:
        """The scaling of rotary frequencies in each layer of their cycle; empty without rotary positions."""
        positions = self.positions
        return tuple(f.scaling for f in positions.frequencies) if isinstance(positions, RotaryPositions) else ()

    @property
    def num_groups(self) -> int:
        """Number of query heads that share one kv head."""
        return self.num_heads // self.num_kv_heads

    @property
    def num_dense_layers(self) -> int:
        """Number of dense layers before the cycle `Experts.layers`; the number of all layers without experts."""
        return self.experts.num_dense_layers if self.experts else self.num_layers

    @property
    def query_key_dim(self) -> int:
        """Size of a head's queries and keys."""
        latent = self.attention.latent
        return latent.nope_head_dim + latent.rope_head_dim if latent else self.head_dim

    @property
    def value_dim(self) -> int:
        """Size of a head's values."""
        latent = self.attention.latent
        return latent.value_head_dim if latent else self.head_dim


@dataclass(frozen=True, kw_only=True)
class ProgramModel:
    """Any model that is given as ops (`step.layer`). It is planned like a decoder, but cannot run.

    Attributes:
        experts: the experts that its `Dispatch` ops route to; None without such ops.
        has_stages: whether its stacks run one after another, so that pp can split them into stages.
    """

    name: str
    program: Program
    experts: Experts | None = None
    has_stages: bool = False

    def __hash__(self) -> int:
        """Hash only the name: caches of the search hash models very often."""
        return hash(self.name)

    @property
    def num_layers(self) -> int:
        """Number of layers in all stacks."""
        return sum(stack.num_layers for stack in self.program.stacks)

    @property
    def num_dense_layers(self) -> int:
        """Number of dense layers before the MoE layers; 0 without experts."""
        return self.experts.num_dense_layers if self.experts else 0

    @property
    def mlp(self) -> int:
        """Width of the widest MLP; 0 without any."""
        return max((op.width for stack in self.program.stacks for op in stack.ops if isinstance(op, Gated)), default=0)

    @property
    def tied_embeddings(self) -> bool:
        """Whether an embedding table is also the unembedding."""
        return any(isinstance(op, Lookup) and op.is_tied for op in self.program.embedding)

    @property
    def planned_only(self) -> tuple[str, ...]:
        """Features that can only be planned: never empty, because a model written as ops cannot run."""
        return ("ops of its own",)


Model = ModelConfig | ProgramModel
"""The model of a step: a decoder's configuration, or ops."""


def without_lora(model: Model) -> Model:
    """Return the model without its LoRA adapters."""
    return replace(model, lora=None) if isinstance(model, ModelConfig) else model


def rotary(theta: float, scaling: RopeScaling | None = None) -> RotaryPositions:
    """Return rotary positions with the same frequencies in all layers."""
    return RotaryPositions(frequencies=(Frequencies(theta=theta, scaling=scaling),))


def _check_whole(model: ModelConfig, field: str, value: int) -> None:
    """Raise if a size of a model is not from 1 to the largest allowed."""
    if not 1 <= value <= largest(field):
        raise MeshwrightError(
            f"model {model.name} has {field}={value!r}; it takes a whole number from 1 to {largest(field):,}"
        )


def _check_cycle(model: ModelConfig, field: str, cycle: tuple[Any, ...]) -> None:
    if not cycle:
        raise MeshwrightError(
            f"model {model.name} has {field}=(); it takes one for all layers, or one for each of a cycle of layers"
        )


def _check_rotary(model: ModelConfig, positions: RotaryPositions) -> None:
    """Raise if frequencies do not fit the dims that they rotate."""
    check_fields(positions)
    _check_cycle(model, "positions.frequencies", positions.frequencies)
    if not 0 <= positions.dims <= model.head_dim:
        raise MeshwrightError(
            f"model {model.name} has positions.dims={positions.dims}; it is from 0 to head_dim={model.head_dim}"
        )
    if latent := model.attention.latent:
        field, dims = "qk_rope_head_dim", latent.rope_head_dim
    else:
        field, dims = ("positions.dims", positions.dims) if positions.dims else ("head_dim", model.head_dim)
    # As in transformers: if the number of rotated dims is odd, one more is rotated.
    has_one_more = field == "positions.dims" and dims < model.head_dim
    for frequencies in positions.frequencies:
        check_fields(frequencies)
        theta, scaling, pairs = frequencies.theta, frequencies.scaling, dims // 2
        is_yarn = isinstance(scaling, YarnRopeScaling)
        if theta <= (1 if is_yarn else 0):
            raise MeshwrightError(
                f"model {model.name} has theta={theta:g}; it takes a number above {'1 with yarn' if is_yarn else '0'}"
            )
        if dims % 2 and (is_yarn or not has_one_more or isinstance(scaling, LongRopeScaling)):
            raise MeshwrightError(f"model {model.name} has {field}={dims}; rotary embedding wants an even one")
        if isinstance(scaling, LongRopeScaling):
            for name in ("short_factor", "long_factor"):
                if (count := len(getattr(scaling, name))) != pairs:
                    raise MeshwrightError(
                        f"model {model.name} has {count} numbers in its rope scaling's {name}; it takes one for each of"
                        f" the {pairs} pairs of rotated dims"
                    )
        if isinstance(scaling, DynamicRopeScaling) and pairs < 2:
            raise MeshwrightError(
                f"model {model.name} rotates {2 * pairs} dims of a head; dynamic rope scaling wants 4"
            )
