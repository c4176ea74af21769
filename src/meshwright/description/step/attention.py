"""Kinds of attention besides a decoder's usual one: latent, linear, and heads that differ between layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from meshwright.errors import MeshwrightError

if TYPE_CHECKING:
    from meshwright.description.step.model import ModelConfig


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
class KeySharing:
    """The last layers of a model, which have no keys and values of their own (Gemma 3n, Gemma 4 E2B).

    Each attends to those of the last earlier layer that is of its kind, with a window or without.
    """

    num_layers: int
    mlp: int  # Width of the MLPs of these layers.


@dataclass(frozen=True, kw_only=True)
class FullHeads:
    """Heads of the layers without a window, if they differ from those of layers with one (Gemma 4)."""

    num_kv_heads: int
    head_dim: int
    are_values_keys: bool = False  # Whether values are the projected keys, before the keys' norm and rotation.


def check_full_heads(model: ModelConfig, full: FullHeads) -> None:
    """Raise if the heads of layers without a window do not fit the model."""
    attention = model.attention
    wrong = (
        model.num_heads % full.num_kv_heads
        or attention.window is None
        or None not in attention.windows
        or attention.latent
        or attention.linear
        or attention.has_output_gate
        or (full.are_values_keys and not attention.has_value_norm)
    )
    if wrong:
        raise MeshwrightError(
            f"model {model.name} has attention.full_heads={full!r}; its kv heads divide num_heads={model.num_heads},"
            f" some layers have a window and some do not, and values that are keys have a norm of their own"
        )


def check_sharing(model: ModelConfig, sharing: KeySharing) -> None:
    """Raise if no earlier layer has the keys and values that the last layers attend to."""
    attention, own = model.attention, model.num_layers - sharing.num_layers
    windows = [attention.windows[layer % len(attention.windows)] for layer in range(model.num_layers)]
    if sharing.num_layers < 1 or own < 1 or not {*windows[own:]} <= {*windows[:own]}:
        raise MeshwrightError(
            f"model {model.name} has sharing.num_layers={sharing.num_layers} of num_layers={model.num_layers}; there is"
            f" one at least, and an earlier layer with the window of each"
        )
    others = model.experts or attention.latent or attention.linear or model.parallel_blocks
    if others or len({*windows} - {None}) > 1:
        raise MeshwrightError(
            f"model {model.name} has layers without keys and values; they are known of models without experts, latent"
            f" or linear attention and parallel blocks, whose windows are all alike"
        )
