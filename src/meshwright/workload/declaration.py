"""One declared array, and the declarations of a layer: attention, mlp, experts."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from meshwright.workload.config import ModelConfig

Role = Literal["product", "table", "vector"]

STACKED = ("layers", "dense_layers")
"""The logical axes of the dim that layers are stacked along: those of a model's kind, and plain ones before experts."""


@dataclass(frozen=True, kw_only=True)
class Parameter:
    """One array of a model: `axes` names each dim logically, `init` how it starts, `role` what becomes of it.

    init: `ones`, or `normal` with standard deviation `scale`. role: a factor of a product, a table rows are looked up
    in, or a vector added to or multiplied into activations.
    """

    shape: tuple[int, ...]
    axes: tuple[str, ...]
    init: Literal["ones", "normal"] = "normal"
    scale: float = 1.0
    role: Role = "product"

    def __post_init__(self) -> None:
        assert len(self.shape) == len(self.axes), (self.shape, self.axes)

    @property
    def size(self) -> int:
        """The number of its elements."""
        return math.prod(self.shape)

    @property
    def num_layers(self) -> int:
        """The layers it is stacked over; 1 for what stands outside the layers."""
        return self.shape[0] if self.is_stacked else 1

    @property
    def is_stacked(self) -> bool:
        """Whether it is one of a layer's, stacked over layers."""
        return self.axes[0] in STACKED


HEAD_AXES = ("kv_heads", "group", "head_dim")


@dataclass(frozen=True)
class Stack:
    """The declarations of `num_layers` layers of one kind, stacked along `dim`; of what is outside where it is 0.

    Query heads stay grouped by the kv head they share, [embed, kv_heads, group, head_dim], so that splitting kv_heads
    splits both alike. Products that add to the residual stream start smaller by sqrt(2 layers), as GPT-2 does it.
    """

    model: ModelConfig
    num_layers: int = 0
    dim: str = "layers"

    def weight(self, shape: tuple[int, ...], axes: tuple[str, ...], fan_in: int, *, adds: bool = False) -> Parameter:
        """A factor of a product; `adds` where its result is added to the residual stream."""
        scale = 1 / math.sqrt(fan_in * (2 * self.model.num_layers if adds else 1))
        return self._stacked(Parameter(shape=shape, axes=axes, scale=scale))

    def bias(self, shape: tuple[int, ...], axes: tuple[str, ...]) -> Parameter:
        """A vector that is added, zeros at first."""
        return self._stacked(Parameter(shape=shape, axes=axes, scale=0.0, role="vector"))

    def norm(self, name: str, size: int | None = None) -> dict[str, Parameter]:
        """The scale of a norm, and its bias where norms have one."""
        shape = (size or self.model.embed,)
        found = {name: self._stacked(Parameter(shape=shape, axes=("norm",), init="ones", role="vector"))}
        if self.model.norm_bias:
            found[f"{name}_bias"] = self.bias(shape, ("norm",))
        return found

    def attention(self) -> dict[str, Parameter]:
        """The attention block with the norm before it."""
        model = self.model
        D, K, G, V = model.embed, model.num_kv_heads, model.num_groups, model.value_dim
        block = self.norm("attention_norm") | (self._latent_heads() if model.latent else self._heads())
        block["output"] = self.weight((K, G, V, D), (*HEAD_AXES, "embed"), K * G * V, adds=True)
        if model.output_bias:
            block["output_bias"] = self.bias((D,), ("norm",))
        return block | (self.norm("attention_post_norm") if model.post_norms else {})

    def _heads(self) -> dict[str, Parameter]:
        """Queries, keys and values from the stream."""
        model = self.model
        D, K, G, H = model.embed, model.num_kv_heads, model.num_groups, model.head_dim
        shapes = {"query": ((K, G, H), HEAD_AXES)} | dict.fromkeys(("key", "value"), ((K, H), ("kv_heads", "head_dim")))
        found = {name: self.weight((D, *shape), ("embed", *axes), D) for name, (shape, axes) in shapes.items()}
        if model.qkv_bias:
            found |= {f"{name}_bias": self.bias(shape, axes) for name, (shape, axes) in shapes.items()}
        if model.qk_norm:
            found |= self.norm("query_norm", H) | self.norm("key_norm", H)
        return found

    def _latent_heads(self) -> dict[str, Parameter]:
        """Queries, keys and values from latents; each latent is computed whole wherever its heads are split."""
        model, latent = self.model, self.model.latent
        assert latent is not None
        D, N, Q, R = model.embed, model.num_heads, latent.query_rank, latent.kv_rank
        heads = ("kv_heads", "head_dim")
        narrow = R + latent.rope_head_dim
        found = {"latent": self.weight((D, narrow), ("embed", "latent"), D)} | self.norm("latent_norm", R)
        if Q:
            found["query_latent"] = self.weight((D, Q), ("embed", "latent"), D)
            found |= self.norm("query_latent_norm", Q)
            found["query"] = self.weight((Q, N, model.query_key_dim), ("latent_input", *heads), Q)
        else:
            found["query"] = self.weight((D, N, model.query_key_dim), ("embed", *heads), D)
        found["key"] = self.weight((R, N, latent.nope_head_dim), ("latent_input", *heads), R)
        found["value"] = self.weight((R, N, latent.value_head_dim), ("latent_input", *heads), R)
        return found

    def mlp(self) -> dict[str, Parameter]:
        """The mlp block with the norm before it."""
        block = self.norm("mlp_norm") | self._mlp("", self.model.mlp)
        return block | (self.norm("mlp_post_norm") if self.model.post_norms else {})

    def experts(self) -> dict[str, Parameter]:
        """The block of experts with the norm before it, the router and the shared mlp."""
        model, experts = self.model, self.model.experts
        assert experts is not None
        D, E, F = model.embed, experts.count, experts.mlp
        block = self.norm("mlp_norm") | {"router": self.weight((D, E), ("embed", "router"), D)}
        for name in self._inputs():
            block[f"expert_{name}"] = self.weight((E, D, F), ("expert", "embed", "mlp"), D)
        block["expert_down"] = self.weight((E, F, D), ("expert", "mlp", "embed"), F, adds=True)
        return block | (self._mlp("shared_", experts.shared_mlp) if experts.shared_mlp else {})

    def _mlp(self, prefix: str, width: int) -> dict[str, Parameter]:
        """The two products of an mlp, or three where it is gated."""
        D = self.model.embed
        found = {f"{prefix}{name}": self.weight((D, width), ("embed", "mlp"), D) for name in self._inputs()}
        found[f"{prefix}down"] = self.weight((width, D), ("mlp", "embed"), width, adds=True)
        if self.model.mlp_bias:
            found |= {f"{prefix}{name}_bias": self.bias((width,), ("mlp",)) for name in self._inputs()}
            found[f"{prefix}down_bias"] = self.bias((D,), ("norm",))
        return found

    def _inputs(self) -> tuple[str, ...]:
        """The products that an mlp begins with."""
        return ("gate", "up") if self.model.gated else ("up",)

    def _stacked(self, parameter: Parameter) -> Parameter:
        """The parameter with the dim `layers` before it."""
        if not self.num_layers:
            return parameter
        shape, axes = (self.num_layers, *parameter.shape), (self.dim, *parameter.axes)
        return Parameter(shape=shape, axes=axes, init=parameter.init, scale=parameter.scale, role=parameter.role)
