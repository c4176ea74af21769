"""A Hugging Face `config.json` as a model: one reader a family, what they share in one place."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from meshwright.errors import MeshwrightError
from meshwright.workload.config import Experts, LatentAttention, ModelConfig, RopeScaling

Config = Mapping[str, Any]

ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu",
    "gelu_fast": "gelu",
    "gelu_pytorch_tanh": "gelu",
    "relu": "relu",
}


def model_from_hugging_face(data: Config, *, name: str) -> ModelConfig:
    """The model that a Hugging Face `config.json` describes; a family that is not known is refused by name."""
    family = str(data.get("model_type"))
    if family not in _READERS:
        raise MeshwrightError(
            f"the config.json of {name} has model_type {family!r}; those read are {', '.join(_READERS)}"
        )
    try:
        return ModelConfig(name=name, **_READERS[family](data, name))
    except KeyError as error:
        raise MeshwrightError(
            f"the config.json of {name} has no {error.args[0]!r}, which a {family} model needs"
        ) from None


def _llama(data: Config, name: str) -> dict[str, Any]:
    """What llama and all that follow it have in common."""
    heads, embed = data["num_attention_heads"], data["hidden_size"]
    attention_bias = bool(data.get("attention_bias"))
    return {
        "num_layers": data["num_hidden_layers"],
        "embed": embed,
        "mlp": data["intermediate_size"],
        "num_heads": heads,
        "num_kv_heads": data.get("num_key_value_heads") or heads,
        "head_dim": data.get("head_dim") or embed // heads,
        "vocab": data["vocab_size"],
        "tied_embeddings": data.get("tie_word_embeddings", False),
        "activation": _activation(data.get("hidden_act", "silu"), name),
        "qkv_bias": attention_bias,
        "output_bias": attention_bias,
        "mlp_bias": bool(data.get("mlp_bias")),
        "sliding_window": data.get("sliding_window"),
        "rope_theta": float(data.get("rope_theta") or 10_000.0),
        "rope_scaling": _rope_scaling(data.get("rope_scaling"), name),
        "norm_epsilon": float(data.get("rms_norm_eps", 1e-6)),
    }


def _qwen2(data: Config, name: str) -> dict[str, Any]:
    """Qwen2: biases of queries, keys and values; the window is written down but off unless said."""
    window = data.get("sliding_window") if data.get("use_sliding_window") else None
    return _llama(data, name) | {"qkv_bias": True, "sliding_window": window}


def _qwen3(data: Config, name: str) -> dict[str, Any]:
    """Qwen3: normed queries and keys."""
    window = data.get("sliding_window") if data.get("use_sliding_window") else None
    return _llama(data, name) | {"qk_norm": True, "sliding_window": window}


def _gemma(data: Config, name: str) -> dict[str, Any]:
    """Gemma: tied, and gelu whatever `hidden_act` says."""
    return _llama(data, name) | {"activation": "gelu", "tied_embeddings": data.get("tie_word_embeddings", True)}


def _gemma2(data: Config, name: str) -> dict[str, Any]:
    """Gemma 2: norms after blocks too. Every second layer has a window; all are counted as seeing every key."""
    return _gemma(data, name) | {"post_norms": True, "sliding_window": None}


def _gemma3(data: Config, name: str) -> dict[str, Any]:
    """Gemma 3: normed queries and keys besides. Its windows and its rope scaling are those of Gemma 2's kind."""
    plain = {key: value for key, value in data.items() if key != "rope_scaling"}
    return _gemma2(plain, name) | {"qk_norm": True}


def _mixtral(data: Config, name: str) -> dict[str, Any]:
    """Mixtral: every layer has experts as wide as Mistral's mlp."""
    experts = Experts(
        count=data["num_local_experts"], num_active=data["num_experts_per_tok"], mlp=data["intermediate_size"]
    )
    return _llama(data, name) | {"experts": experts}


def _qwen_moe(data: Config, name: str) -> dict[str, Any]:
    """Qwen2-MoE and Qwen3-MoE: every `decoder_sparse_step`-th layer has experts, but for `mlp_only_layers`."""
    layers, step, plain = data["num_hidden_layers"], data.get("decoder_sparse_step", 1), data.get("mlp_only_layers", [])
    sparse = [layer for layer in range(layers) if (layer + 1) % step == 0 and layer not in plain]
    experts = Experts(
        count=data["num_experts"],
        num_active=data["num_experts_per_tok"],
        mlp=data["moe_intermediate_size"],
        shared_mlp=data.get("shared_expert_intermediate_size", 0),
        num_dense_layers=layers - len(sparse),
    )
    base = _qwen2 if data["model_type"] == "qwen2_moe" else _qwen3
    return base(data, name) | {"experts": experts}


def _deepseek(data: Config, name: str) -> dict[str, Any]:
    """DeepSeek-V2 and V3: latent attention, shared and routed experts behind a few dense layers."""
    latent = LatentAttention(
        query_rank=data.get("q_lora_rank"),
        kv_rank=data["kv_lora_rank"],
        nope_head_dim=data["qk_nope_head_dim"],
        rope_head_dim=data["qk_rope_head_dim"],
        value_head_dim=data["v_head_dim"],
    )
    experts = Experts(
        count=data["n_routed_experts"],
        num_active=data["num_experts_per_tok"],
        mlp=data["moe_intermediate_size"],
        shared_mlp=data["moe_intermediate_size"] * (data.get("n_shared_experts") or 0),
        num_dense_layers=data.get("first_k_dense_replace", 0),
    )
    # Its rotary scaling (yarn) changes frequencies alone, nothing that a plan counts.
    plain = {key: value for key, value in data.items() if key != "rope_scaling"}
    return _llama(plain, name) | {
        "num_kv_heads": data["num_attention_heads"],
        "head_dim": latent.value_head_dim,
        "latent": latent,
        "experts": experts,
    }


def _gpt2(data: Config, name: str) -> dict[str, Any]:
    """GPT-2: learned positions, LayerNorm, biases everywhere, tied."""
    heads, embed = data["n_head"], data["n_embd"]
    return _biased(data, name, activation=data.get("activation_function", "gelu_new")) | {
        "num_layers": data["n_layer"],
        "embed": embed,
        "mlp": data.get("n_inner") or 4 * embed,
        "num_heads": heads,
        "num_kv_heads": heads,
        "head_dim": embed // heads,
        "tied_embeddings": data.get("tie_word_embeddings", True),
        "positions": "learned",
        "max_positions": data["n_positions"],
        "norm_epsilon": float(data.get("layer_norm_epsilon", 1e-5)),
    }


def _gpt_neox(data: Config, name: str) -> dict[str, Any]:
    """GPT-NeoX and Pythia: rotary positions, LayerNorm, blocks in parallel, untied."""
    heads, embed, bias = data["num_attention_heads"], data["hidden_size"], data.get("attention_bias", True)
    return _biased(data, name, activation=data.get("hidden_act", "gelu")) | {
        "num_layers": data["num_hidden_layers"],
        "embed": embed,
        "mlp": data["intermediate_size"],
        "num_heads": heads,
        "num_kv_heads": heads,
        "head_dim": embed // heads,
        "tied_embeddings": data.get("tie_word_embeddings", False),
        "qkv_bias": bias,
        "output_bias": bias,
        "parallel_blocks": data.get("use_parallel_residual", True),
        "rope_theta": float(data.get("rotary_emb_base", data.get("rope_theta", 10_000.0))),
        "norm_epsilon": float(data.get("layer_norm_eps", 1e-5)),
    }


def _biased(data: Config, name: str, *, activation: str) -> dict[str, Any]:
    """What the GPT families share: plain mlps, LayerNorm, biases."""
    return {
        "vocab": data["vocab_size"],
        "gated": False,
        "activation": _activation(activation, name),
        "norm": "layer",
        "norm_bias": True,
        "qkv_bias": True,
        "output_bias": True,
        "mlp_bias": True,
    }


_READERS: Mapping[str, Callable[[Config, str], dict[str, Any]]] = {
    "llama": _llama,
    "mistral": _llama,
    "mixtral": _mixtral,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "qwen2_moe": _qwen_moe,
    "qwen3_moe": _qwen_moe,
    "gemma": _gemma,
    "gemma2": _gemma2,
    "gemma3_text": _gemma3,
    "gpt2": _gpt2,
    "gpt_neox": _gpt_neox,
    "deepseek_v2": _deepseek,
    "deepseek_v3": _deepseek,
}


def _activation(said: str, name: str) -> str:
    """The activation in our words."""
    if said not in ACTIVATIONS:
        raise MeshwrightError(
            f"the config.json of {name} has the activation {said!r}; those read are {', '.join(ACTIVATIONS)}"
        )
    return ACTIVATIONS[said]


def _rope_scaling(data: Config | None, name: str) -> RopeScaling | None:
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
