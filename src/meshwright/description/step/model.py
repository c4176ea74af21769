"""A model's configuration: sizes and features. `step.blocks` turns it into ops."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

from meshwright.description.step.frequencies import DynamicRopeScaling, LongRopeScaling, RopeScaling, YarnRopeScaling
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
)
from meshwright.description.step.lora import LoRA
from meshwright.errors import MeshwrightError
from meshwright.support.field_types import check_fields

SIZES = ("num_layers", "embed", "mlp", "num_heads", "num_kv_heads", "head_dim", "vocab")
"""Model fields that must be whole numbers from 1."""

ABOVE_ZERO = (
    *("rope_theta", "rope_theta_local", "attention_softcap", "logits_softcap", "attention_scale"),
    *("embedding_scale", "residual_scale", "logits_scale", "norm_epsilon"),
)
"""Model fields that must be above 0, or None."""


def largest(field: str) -> int:
    """Return the largest value allowed for a size; a search over larger sizes would take too long."""
    return {"num_layers": 10**4, "seq_len": 10**8, "prompt_len": 10**8, "output_len": 10**8}.get(field, 10**9)


@dataclass(frozen=True, kw_only=True)
class Experts:
    """A mixture of experts instead of the MLP: `num_active` of `count` MLPs of width `mlp` process each token."""

    count: int
    num_active: int
    mlp: int
    # Width of the shared MLP, which works on every token (several shared experts count as one wide one); 0: none.
    shared_mlp: int = 0
    has_shared_gate: bool = False  # Whether a sigmoid of each token scales the shared MLP's output (Qwen2-MoE).
    has_bias: bool = False  # Whether router and experts have biases (gpt-oss).
    num_dense_layers: int = 0  # Number of layers with a dense MLP; their positions do not change a step.
    # Slots per expert, as a multiple of its tokens at even load; excess tokens are dropped. None: dropless.
    capacity_factor: float | None = None
    balance_weight: float = 0.01  # Weight of the load balancing loss (Switch, arXiv:2101.03961, section 2.2).
    routing: Routing = SOFTMAX_ROUTING  # How a token's experts are chosen.

    def __post_init__(self) -> None:
        for field, least in (("count", 1), ("num_active", 1), ("mlp", 1), ("shared_mlp", 0), ("num_dense_layers", 0)):
            if (value := getattr(self, field)) < least:
                raise MeshwrightError(f"experts have {field}={value}; it takes a whole number from {least}")
        if self.num_active > self.count:
            raise MeshwrightError(
                f"{self.num_active} active of {self.count} experts; the active are from 1 to all of them"
            )
        if self.capacity_factor is not None and self.capacity_factor <= 0:
            raise MeshwrightError(
                f"experts have capacity_factor={self.capacity_factor:g}; it is above 0, or None where no token is"
                f" dropped"
            )
        if self.balance_weight < 0:
            raise MeshwrightError(f"experts have balance_weight={self.balance_weight:g}; it is from 0")
        if self.has_shared_gate and not self.shared_mlp:
            raise MeshwrightError("experts have has_shared_gate=True and shared_mlp=0; there is nothing to gate")
        self._check_groups()

    def _check_groups(self) -> None:
        """Raise if groups do not divide the experts, or if the active groups have too few experts for a token."""
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

    def slots(self, tokens: int) -> int:
        """Return the slots of each expert for `tokens` tokens of one device, rounded up.

        That is an expert's tokens at even load, times the capacity factor (1 if it is None).
        """
        return math.ceil((self.capacity_factor or 1.0) * tokens * self.num_active / self.count)

    def room(self, tokens: int, ep: int) -> int:
        """Return the maximum number of token copies that a device with `tokens` tokens can send to one of `ep` devices.

        A token has `num_active` copies, at most one for each expert of that device.
        """
        return tokens * min(self.num_active, self.count // ep)


@dataclass(frozen=True, kw_only=True)
class LatentAttention:
    """Multi-head latent attention: keys and values from a narrow latent (DeepSeek-V2, arXiv:2405.04434)."""

    query_rank: int | None  # Width of the queries' latent; None: queries come from the residual stream.
    kv_rank: int
    nope_head_dim: int  # Dims of a query and a key without rotary positions.
    rope_head_dim: int  # Dims with rotary positions.
    value_head_dim: int
    is_interleaved: bool = True  # See `step.layer.Rotary`.
    norm_epsilon: float = 1e-6  # Epsilon of the norms of latents.


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
    activation: Activation = "silu"
    norm: NormKind = "rms"
    norm_bias: bool = False
    norm_offset: float = 0.0  # Added to the scale of every norm; 1 if checkpoints store scales minus 1 (Gemma).
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    unembedding_bias: bool = False  # Of an untied unembedding (Phi).
    qk_norm: bool = False  # Norm of each query and key head (Qwen3).
    qk_norm_over_heads: bool = False  # That norm is over all heads of a token together (OLMo 2).
    qk_norm_after_rotary: bool = False  # That norm follows the rotary embedding (Hunyuan).
    pre_norms: bool = True  # Norm of the residual stream before each block.
    post_norms: bool = False  # Norm of each block's output, before it is added to the residual stream (Gemma 2).
    embedding_norm: bool = False  # Norm after the embedding (BLOOM).
    # Attention and MLP read the same residual stream, so their outputs are summed over devices at once (GPT-J, PaLM).
    parallel_blocks: bool = False
    shared_norm: bool = False  # Parallel blocks have one norm for attention and MLP (Command R).
    positions: Literal["rotary", "learned", "alibi"] = "rotary"
    max_positions: int = 0  # Rows of the table of learned positions.
    sliding_window: int | None = None  # Keys a query attends to, its own included; None: all before it.
    full_attention_every: int = 0  # Every n-th layer attends to all keys; 0: the window is in all layers.
    full_attention_layers: tuple[int, ...] = ()  # Indices from 0 of layers that attend to all keys, if no n fits.
    rope_theta: float = 10_000.0
    # Theta of layers with a window, without scaling; None: as in other layers.
    rope_theta_local: float | None = None
    rope_scaling: RopeScaling | None = None
    rotary_dims: int = 0  # First dims of a head that are rotated; 0: all.
    rotary_interleaved: bool = False  # Pairs of adjacent dims are rotated (see `step.layer.Rotary`).
    unrotated_every: int = 0  # Every n-th layer has no rotary embedding (SmolLM3); 0: all have it.
    unrotated_layers: tuple[int, ...] = ()  # Indices from 0 of layers without rotary embedding, if no n fits.
    attention_softcap: float | None = None  # Scores become c * tanh(scores / c).
    logits_softcap: float | None = None  # The same for logits.
    attention_scale: float | None = None  # Factor of the scores; None: 1 / sqrt(head_dim).
    embedding_scale: float = 1.0  # Factor of embeddings.
    residual_scale: float = 1.0  # Factor of each block's output as it is added to the residual stream (Granite).
    logits_scale: float = 1.0  # Factor of logits, before their softcap.
    norm_epsilon: float = 1e-5
    attention_sinks: bool = False  # Learned logit of each head that takes part in its softmax (gpt-oss).
    clamped_swiglu: ClampedSwiglu | None = None  # Activation of MLPs instead of `activation` (gpt-oss).
    experts: Experts | None = None
    latent: LatentAttention | None = None
    lora: LoRA | None = None  # Low-rank adapters, the only parameters that train.
    # Features of the Hugging Face model that cannot run here, and do not change a plan.
    planned_only: tuple[str, ...] = ()

    def __hash__(self) -> int:
        """Hash only the fields that differ most: caches of the search hash models very often."""
        return hash((self.name, self.num_layers, self.embed))

    def __post_init__(self) -> None:
        check_fields(self)
        for field in SIZES:
            _check_whole(self, field)
        for field in ABOVE_ZERO:
            if (value := getattr(self, field)) is not None and value <= 0:
                raise MeshwrightError(f"model {self.name} has {field}={value:g}; it takes a number above 0")
        if self.num_heads % self.num_kv_heads:
            raise MeshwrightError(
                f"model {self.name} has num_heads={self.num_heads} and num_kv_heads={self.num_kv_heads};"
                f" heads are shared evenly, so kv heads must divide heads"
            )
        _check_positions(self)
        _check_unrotated(self)
        _check_rope_scaling(self)
        if self.experts and self.experts.num_dense_layers >= self.num_layers:
            raise MeshwrightError(
                f"model {self.name} has num_dense_layers={self.experts.num_dense_layers} of"
                f" num_layers={self.num_layers}, which leaves no layer to its experts; use num_layers"
                f" {self.experts.num_dense_layers + 1} or more"
            )

    @property
    def needs_scores(self) -> bool:
        """Whether attention scores must go through memory: no fused kernel supports a softcap or sinks."""
        return self.attention_softcap is not None or self.attention_sinks

    def rotates(self, layer: int) -> bool:
        """Whether a layer, counted from 0, has rotary embedding, in a model with rotary positions."""
        every = self.unrotated_every
        return layer not in self.unrotated_layers and not (every and (layer + 1) % every == 0)

    @property
    def num_groups(self) -> int:
        """Number of query heads that share one kv head."""
        return self.num_heads // self.num_kv_heads

    @property
    def num_dense_layers(self) -> int:
        """Number of layers with a dense MLP."""
        return self.experts.num_dense_layers if self.experts else self.num_layers

    @property
    def query_key_dim(self) -> int:
        """Size of a head's queries and keys."""
        return self.latent.nope_head_dim + self.latent.rope_head_dim if self.latent else self.head_dim

    @property
    def rotated_dims(self) -> int:
        """Number of dims of a head that rotary embedding rotates."""
        return self.latent.rope_head_dim if self.latent else self.rotary_dims or self.head_dim

    @property
    def value_dim(self) -> int:
        """Size of a head's values."""
        return self.latent.value_head_dim if self.latent else self.head_dim


@dataclass(frozen=True, kw_only=True)
class ProgramModel:
    """Any model written as ops (`step.layer`). It is planned like a decoder, but cannot run.

    Attributes:
        experts: the experts that its `Dispatch` ops route to.
        has_stages: whether its stacks run one after the other, so that pp can split them into stages.
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


def _check_whole(model: ModelConfig, field: str) -> None:
    """Raise if a size of a model is not from 1 to the largest allowed."""
    if not 1 <= (value := getattr(model, field)) <= largest(field):
        raise MeshwrightError(
            f"model {model.name} has {field}={value!r}; it takes a whole number from 1 to {largest(field):,}"
        )


def _check_positions(model: ModelConfig) -> None:
    """Raise if a model's options of positions or windows contradict each other."""
    if model.positions == "rotary":
        _check_rotated_dims(model)
    if not 0 <= model.rotary_dims <= model.head_dim:
        raise MeshwrightError(
            f"model {model.name} has rotary_dims={model.rotary_dims}; it is from 0 to head_dim={model.head_dim}"
        )
    if model.positions == "learned":
        _check_whole(model, "max_positions")
    if model.sliding_window is not None:
        _check_whole(model, "sliding_window")
    elif model.full_attention_every or model.full_attention_layers or model.rope_theta_local is not None:
        raise MeshwrightError(
            f"model {model.name} has layers with a window, and no sliding_window; give one, or leave out"
            f" full_attention_every, full_attention_layers and rope_theta_local"
        )
    if model.full_attention_layers and (
        model.full_attention_every or not all(0 <= layer < model.num_layers for layer in model.full_attention_layers)
    ):
        raise MeshwrightError(
            f"model {model.name} has full_attention_layers={model.full_attention_layers}; they are layers from 0 to"
            f" {model.num_layers - 1}, and full_attention_every is left out beside them"
        )


def _check_unrotated(model: ModelConfig) -> None:
    """Raise if the layers without rotary embedding are no layers of the model, or the model rotates none."""
    if not all(0 <= layer < model.num_layers for layer in model.unrotated_layers):
        raise MeshwrightError(
            f"model {model.name} has unrotated_layers={model.unrotated_layers}; they are layers from 0 to"
            f" {model.num_layers - 1}"
        )
    if (model.unrotated_every or model.unrotated_layers) and (model.positions != "rotary" or model.latent):
        raise MeshwrightError(
            f"model {model.name} has layers without rotary embedding, by unrotated_every and unrotated_layers, which"
            f" differ from others only with positions='rotary' and without latent attention"
        )


def _check_rotated_dims(model: ModelConfig) -> None:
    """Raise if rotary embedding would rotate an odd number of dims and cannot add one more to pair them."""
    if model.latent:
        name, dims, most = "qk_rope_head_dim", model.latent.rope_head_dim, 0
    else:
        # As in transformers, an odd number of dims rotates one more, with the frequencies of the odd number.
        name, dims, most = (
            ("rotary_dims", model.rotary_dims, model.head_dim) if model.rotary_dims else ("head_dim", model.head_dim, 0)
        )
    if dims % 2 and (dims >= most or isinstance(model.rope_scaling, YarnRopeScaling | LongRopeScaling)):
        raise MeshwrightError(f"model {model.name} has {name}={dims}; rotary embedding wants an even one")


def _check_rope_scaling(model: ModelConfig) -> None:
    """Raise if a model's rope scaling does not fit its rotated dims or its theta."""
    scaling, pairs = model.rope_scaling, model.rotated_dims // 2
    if isinstance(scaling, LongRopeScaling):
        for name in ("short_factor", "long_factor"):
            if (count := len(getattr(scaling, name))) != pairs:
                raise MeshwrightError(
                    f"model {model.name} has {count} numbers in its rope scaling's {name}; it takes one for each of the"
                    f" {pairs} pairs of rotated dims"
                )
    if isinstance(scaling, DynamicRopeScaling) and pairs < 2:
        raise MeshwrightError(f"model {model.name} rotates {2 * pairs} dims of a head; dynamic rope scaling wants 4")
    if isinstance(scaling, YarnRopeScaling) and model.rope_theta <= 1:
        raise MeshwrightError(f"model {model.name} has rope_theta={model.rope_theta:g}; yarn wants one above 1")
