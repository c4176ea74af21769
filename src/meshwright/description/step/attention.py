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


def check_full_heads(
    full: FullHeads, windows: tuple[int | None, ...], *, name: str, num_heads: int, is_known: bool
) -> None:
    """Raise if the heads of layers without a window do not fit a model.

    Args:
        windows: the window of each layer, as a cycle.
        name: the model's name.
        num_heads: its query heads in every layer.
        is_known: whether such heads are known with its other features.
    """
    if num_heads % full.num_kv_heads or None not in windows or {*windows} == {None} or not is_known:
        raise MeshwrightError(
            f"model {name} has attention.full_heads={full!r}; its kv heads divide num_heads={num_heads}, some layers"
            f" have a window and some do not, and values that are keys have a norm of their own"
        )


def check_sharing(sharing: KeySharing, windows: tuple[int | None, ...], *, name: str, is_known: bool) -> None:
    """Raise if no earlier layer has the keys and values that the last layers attend to.

    windows: the window of every layer. name, is_known: as in `check_full_heads`.
    """
    count, layers = sharing.num_layers, len(windows)
    if not 1 <= count < layers or not {*windows[layers - count :]} <= {*windows[: layers - count]}:
        raise MeshwrightError(
            f"model {name} has sharing.num_layers={count} of num_layers={layers}; there is one at least, and an earlier"
            f" layer with the window of each"
        )
    if not is_known or len({*windows} - {None}) > 1:
        raise MeshwrightError(
            f"model {name} has layers without keys and values; they are known of models without experts, latent or"
            f" linear attention and parallel blocks, whose windows are all alike"
        )
