"""The shape of a model: a decoder of attention and mlp blocks, dense or with experts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from meshwright.errors import MeshwrightError
from meshwright.workload.choices import check_choices


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """How Llama 3.1 stretches rotary frequencies beyond the length it was first trained on (arXiv:2407.21783)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_seq_len: int


@dataclass(frozen=True, kw_only=True)
class Experts:
    """A mixture of experts in place of the mlp: `num_active` of `count` mlps of width `mlp` work on a token.

    shared_mlp: the width of the mlp that works on every token beside them (several shared experts count as one wide
    one), 0 where there is none. num_dense_layers: the layers that keep a plain mlp; which ones does not change a step.
    capacity_factor: the slots an expert has, as a multiple of the tokens it would get in balance; tokens beyond are
    dropped. None: none are. balance_weight: what the loss of imbalance counts beside that of tokens (Switch,
    arXiv:2101.03961, section 2.2).
    """

    count: int
    num_active: int
    mlp: int
    shared_mlp: int = 0
    num_dense_layers: int = 0
    capacity_factor: float | None = None
    balance_weight: float = 0.01

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

    def slots(self, tokens: int) -> int:
        """The slots that an expert has for a device of so many tokens, where there is a capacity; else as in balance.

        Whole ones from each device.
        """
        return math.ceil((self.capacity_factor or 1.0) * tokens * self.num_active / self.count)

    def room(self, tokens: int, ep: int) -> int:
        """The most copies that a device of so many tokens can send one of `ep`: a token is sent once to an expert."""
        return tokens * min(self.num_active, self.count // ep)


@dataclass(frozen=True, kw_only=True)
class LatentAttention:
    """Multi-head latent attention: keys and values come from a narrow latent (DeepSeek-V2, arXiv:2405.04434).

    query_rank: the width of the queries' own latent; None where they come from the stream itself. A query and a key
    have `nope_head_dim` dims without and `rope_head_dim` with rotary positions, a value `value_head_dim`.
    """

    query_rank: int | None
    kv_rank: int
    nope_head_dim: int
    rope_head_dim: int
    value_head_dim: int


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A decoder; the defaults are Llama's: grouped-query attention, RoPE, RMSNorm, SwiGLU, no biases.

    max_positions: the rows of the table of learned positions. embedding_norm: a norm right after the lookup (BLOOM).
    qk_norm: a norm of each query and key head (Qwen3). post_norms: each block's output is normed before it is added
    (Gemma 2). parallel_blocks: attention and mlp read the same stream, so that
    their outputs are added, and summed over devices, at once (GPT-J, PaLM). sliding_window: the keys a query sees.
    """

    name: str
    num_layers: int
    embed: int
    mlp: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab: int
    tied_embeddings: bool = False
    gated: bool = True
    activation: Literal["silu", "gelu", "relu"] = "silu"
    norm: Literal["rms", "layer"] = "rms"
    norm_bias: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    post_norms: bool = False
    embedding_norm: bool = False
    parallel_blocks: bool = False
    positions: Literal["rotary", "learned", "alibi"] = "rotary"
    max_positions: int = 0
    sliding_window: int | None = None
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    norm_epsilon: float = 1e-5
    experts: Experts | None = None
    latent: LatentAttention | None = None

    def __post_init__(self) -> None:
        check_choices(self)
        for field in ("num_layers", "embed", "mlp", "num_heads", "num_kv_heads", "head_dim", "vocab"):
            value = getattr(self, field)
            if not isinstance(value, int) or value < 1:
                raise MeshwrightError(f"model {self.name} has {field}={value!r}; it takes a whole number from 1")
        if self.num_heads % self.num_kv_heads:
            raise MeshwrightError(
                f"model {self.name} has num_heads={self.num_heads} and num_kv_heads={self.num_kv_heads};"
                f" heads are shared evenly, so kv heads must divide heads"
            )
        if self.head_dim % 2 and self.positions == "rotary":
            raise MeshwrightError(f"model {self.name} has head_dim={self.head_dim}; rotary embedding wants an even one")
        if self.experts and self.experts.num_dense_layers >= self.num_layers:
            raise MeshwrightError(
                f"model {self.name} has num_dense_layers={self.experts.num_dense_layers} of"
                f" num_layers={self.num_layers}, which leaves no layer to its experts; use num_layers"
                f" {self.experts.num_dense_layers + 1} or more"
            )

    @property
    def num_groups(self) -> int:
        """The query heads that share one kv head."""
        return self.num_heads // self.num_kv_heads

    @property
    def num_dense_layers(self) -> int:
        """The layers with a plain mlp."""
        return self.experts.num_dense_layers if self.experts else self.num_layers

    @property
    def query_key_dim(self) -> int:
        """The dims of a head over which a query and a key are multiplied."""
        return self.latent.nope_head_dim + self.latent.rope_head_dim if self.latent else self.head_dim

    @property
    def value_dim(self) -> int:
        """The dims of a head's value."""
        return self.latent.value_head_dim if self.latent else self.head_dim


def model_from_data(data: Mapping[str, Any]) -> ModelConfig:
    """The model that `dataclasses.asdict` took apart."""
    parts = {"rope_scaling": RopeScaling, "experts": Experts, "latent": LatentAttention}
    built = {name: part(**data[name]) for name, part in parts.items() if data.get(name)}
    return ModelConfig(**(dict(data) | built))
