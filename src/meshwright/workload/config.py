"""The shape of a model: from a preset, or from a Hugging Face `config.json`."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwright.errors import MeshwrightError


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """How Llama 3.1 stretches rotary frequencies beyond the length it was first trained on (arXiv:2407.21783)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_seq_len: int


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A Llama-style decoder: grouped-query attention, RoPE, RMSNorm, SwiGLU, embeddings tied or not."""

    name: str
    num_layers: int
    embed: int
    mlp: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab: int
    tied_embeddings: bool = False
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    norm_epsilon: float = 1e-5

    def __post_init__(self) -> None:
        for field in ("num_layers", "embed", "mlp", "num_heads", "num_kv_heads", "head_dim", "vocab"):
            value = getattr(self, field)
            if not isinstance(value, int) or value < 1:
                raise MeshwrightError(f"model {self.name} has {field}={value!r}; it takes a whole number from 1")
        if self.num_heads % self.num_kv_heads:
            raise MeshwrightError(
                f"model {self.name} has num_heads={self.num_heads} and num_kv_heads={self.num_kv_heads};"
                f" heads are shared evenly, so kv heads must divide heads"
            )
        if self.head_dim % 2:
            raise MeshwrightError(f"model {self.name} has head_dim={self.head_dim}; rotary embedding wants an even one")

    @property
    def num_groups(self) -> int:
        """The query heads that share one kv head."""
        return self.num_heads // self.num_kv_heads


def _llama(
    name: str, layers: int, embed: int, mlp: int, heads: int, kv_heads: int, vocab: int, **more: Any
) -> ModelConfig:
    """A preset with heads of 128."""
    return ModelConfig(
        name=name,
        num_layers=layers,
        embed=embed,
        mlp=mlp,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=128,
        vocab=vocab,
        **more,
    )


_TINY = ModelConfig(name="tiny", num_layers=2, embed=128, mlp=384, num_heads=8, num_kv_heads=8, head_dim=16, vocab=256)

PRESETS: Mapping[str, ModelConfig] = {
    model.name: model
    for model in (
        # A byte-level model that learns in minutes on a laptop; 8 kv heads, so that tp may be 8.
        _TINY,
        # Llama 2: arXiv:2307.09288 and the config.json published with the weights.
        _llama("llama2-7b", 32, 4096, 11008, 32, 32, 32_000),
        _llama("llama2-13b", 40, 5120, 13824, 40, 40, 32_000),
        _llama("llama2-70b", 80, 8192, 28672, 64, 8, 32_000),
        # Llama 3: arXiv:2407.21783, table 3, and the config.json published with the weights.
        _llama("llama3-8b", 32, 4096, 14336, 32, 8, 128_256, rope_theta=500_000.0),
        _llama("llama3-70b", 80, 8192, 28672, 64, 8, 128_256, rope_theta=500_000.0),
        _llama("llama3-405b", 126, 16384, 53248, 128, 8, 128_256, rope_theta=500_000.0),
    )
}


def load_model(name: str) -> ModelConfig:
    """The model of a preset's name, or of a path to a `config.json` (or to the folder that holds one)."""
    if name in PRESETS:
        return PRESETS[name]
    path = Path(name)
    if path.is_dir():
        path /= "config.json"
    if path.is_file():
        return _read_config(path)
    near = difflib.get_close_matches(name, PRESETS, n=1)
    hint = f"did you mean {near[0]}? " if near else ""
    raise MeshwrightError(
        f"no model {name!r}; {hint}models are {', '.join(PRESETS)}, or the path of a Hugging Face config.json"
    )


def _read_config(path: Path) -> ModelConfig:
    """The model of a file."""
    try:
        data = json.loads(path.read_text())
    except ValueError as error:
        raise MeshwrightError(f"{path} is not JSON: {error}") from None
    if not isinstance(data, dict):
        raise MeshwrightError(f"{path} holds a {type(data).__name__}; a config.json holds an object")
    return model_from_hugging_face(data, name=path.parent.name or path.stem)


def model_from_hugging_face(data: Mapping[str, Any], *, name: str) -> ModelConfig:
    """The model that a Hugging Face `config.json` describes; what the decoder would compute otherwise is refused."""
    _refuse_unsupported(data, name)
    try:
        heads, embed = data["num_attention_heads"], data["hidden_size"]
        return ModelConfig(
            name=name,
            num_layers=data["num_hidden_layers"],
            embed=embed,
            mlp=data["intermediate_size"],
            num_heads=heads,
            num_kv_heads=data.get("num_key_value_heads") or heads,
            head_dim=data.get("head_dim") or embed // heads,
            vocab=data["vocab_size"],
            tied_embeddings=data.get("tie_word_embeddings", False),
            rope_theta=float(data.get("rope_theta", 10_000.0)),
            rope_scaling=_rope_scaling(data.get("rope_scaling"), name),
            norm_epsilon=float(data.get("rms_norm_eps", 1e-6)),
        )
    except KeyError as error:
        raise MeshwrightError(
            f"the config.json of {name} has no {error.args[0]!r}, which a Llama-style model needs"
        ) from None


def _refuse_unsupported(data: Mapping[str, Any], name: str) -> None:
    """Raise where the config asks for what the decoder would compute differently."""
    family = data.get("model_type")
    if family not in ("llama", "mistral"):
        raise MeshwrightError(f"the config.json of {name} has model_type {family!r}; llama and mistral are read")
    unsupported = {
        "hidden_act": data.get("hidden_act", "silu") not in ("silu", "swish"),
        "attention_bias": bool(data.get("attention_bias")),
        "mlp_bias": bool(data.get("mlp_bias")),
        "sliding_window": data.get("sliding_window") is not None,
    }
    for field, refused in unsupported.items():
        if refused:
            raise MeshwrightError(f"the config.json of {name} has {field}={data[field]!r}, which is not supported")


def _rope_scaling(data: Mapping[str, Any] | None, name: str) -> RopeScaling | None:
    """The frequency scaling of a config; only Llama 3.1's kind is known."""
    if data is None:
        return None
    kind = data.get("rope_type", data.get("type"))
    if kind == "default":
        return None
    if kind != "llama3":
        raise MeshwrightError(
            f"the config.json of {name} has rope_scaling of type {kind!r}; llama3 and default are known"
        )
    return RopeScaling(
        factor=data["factor"],
        low_freq_factor=data["low_freq_factor"],
        high_freq_factor=data["high_freq_factor"],
        original_max_seq_len=data["original_max_position_embeddings"],
    )
