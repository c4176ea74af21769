"""Kinds of attention besides a decoder's usual one: latent, linear, and heads that differ between layers."""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.errors import MeshwrightError


@dataclass(frozen=True, kw_only=True)
class LatentAttention:
    """Multi-head latent attention: keys and values from a narrow latent (DeepSeek-V2, arXiv:2405.04434)."""

    query_rank: int | None  # Width of the queries' latent; None: queries come from the residual stream.
    kv_rank: int
    nope_head_dim: int  # Dims of a query and a key without rotary positions.
    rope_head_dim: int  # Dims with rotary positions.
    value_head_dim: int
    norm_epsilon: float = 1e-6  # Epsilon of the norms of latents.

    def __post_init__(self) -> None:
        for field in ("query_rank", "kv_rank", "nope_head_dim", "rope_head_dim", "value_head_dim"):
            if (value := getattr(self, field)) is not None and value < 1:
                raise MeshwrightError(f"attention has {field}={value}; it takes a whole number from 1")


@dataclass(frozen=True, kw_only=True)
class LinearAttention:
    """Layers with the gated delta rule instead of attention (Gated DeltaNet, arXiv:2412.06464; Qwen3-Next)."""

    num_heads: int  # Heads of queries and keys.
    num_value_heads: int  # Evenly shared among the heads of queries and keys.
    key_dim: int  # Dims of a query and a key.
    value_dim: int
    taps: int = 4  # Tokens that the convolution of queries, keys and values covers.
    # Whether each layer has it instead of attention, as a cycle that repeats.
    layers: tuple[bool, ...] = (True, True, True, False)

    def __post_init__(self) -> None:
        for field in ("num_heads", "num_value_heads", "key_dim", "value_dim", "taps"):
            if (value := getattr(self, field)) < 1:
                raise MeshwrightError(f"linear attention has {field}={value}; it takes a whole number from 1")
        if self.num_value_heads % self.num_heads:
            raise MeshwrightError(
                f"linear attention has num_value_heads={self.num_value_heads} and num_heads={self.num_heads}; value"
                f" heads are shared evenly, so heads must divide them"
            )
        if all(self.layers) or not any(self.layers):
            raise MeshwrightError(
                f"linear attention has layers={self.layers!r}; a cycle has layers with it and layers with attention"
            )


@dataclass(frozen=True, kw_only=True)
class FullHeads:
    """Heads of the layers without a window, if they differ from those of layers with one (Gemma 4)."""

    num_kv_heads: int
    head_dim: int
    are_values_keys: bool = False  # Whether values are the projected keys, before the keys' norm and rotation.
