"""Llama, Mistral and Ministral 3: grouped-query attention, RoPE, RMSNorm, SwiGLU.

Mistral has a sliding window in every layer; Ministral 3 multiplies queries by a number that grows with their position.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from meshwright.description.families.family import LLAMA_NAMES, Features, PublishedFamily, names_of
from meshwright.description.families.fields import Fields, activation_name
from meshwright.description.families.rope_fields import (
    check_query_scaling,
    frequencies_of,
    longest_sequence,
    read_rotary,
    rope_parameters,
    rotary_share,
)
from meshwright.description.step.layer import of_layers
from meshwright.description.step.model import AttentionConfig, Biases, Family, ModelConfig, Norms, rotary

LLAMA = Family("llama")

NORMS = Norms()


def read(
    fields: Fields,
    *,
    norms: Norms = NORMS,
    has_rope: bool = True,
    has_windows: bool = True,
    partial_field: str | None = None,
    norm_field: str = "rms_norm_eps",
    mlp_field: str = "intermediate_size",
) -> Features:
    """Read the fields that Llama and the families derived from it share.

    Args:
        norms: the family's norms; epsilon is replaced by the file's.
        has_rope: False if the family reads its rotary embedding itself.
        has_windows: False if the family reads its windows itself.
        partial_field: as in `read_rope`.
        norm_field: the config.json field with the norms' epsilon.
        mlp_field: the field with the width of the MLPs.
    """
    heads, embed = fields.whole("num_attention_heads"), fields.whole("hidden_size")
    layers, bias = fields.whole("num_hidden_layers"), fields.flag("attention_bias", False)
    head_dim = fields.head_dim(embed, heads)
    features = {
        "num_layers": layers,
        "embed": embed,
        "mlp": fields.whole(mlp_field),
        "num_heads": heads,
        "num_kv_heads": fields.kv_heads(heads),
        "head_dim": head_dim,
        "vocab": fields.whole("vocab_size"),
        "tied_embeddings": fields.flag("tie_word_embeddings", False),
        "activation": fields.activation("hidden_act", "silu"),
        "biases": Biases(qkv=bias, output=bias, mlp=fields.flag("mlp_bias", False)),
        "attention": AttentionConfig(windows=fields.windows(layers) if has_windows else (None,)),
        "norms": replace(norms, epsilon=fields.positive(norm_field, 1e-6)),
    }
    return (
        features | {"positions": read_rotary(fields, head_dim, partial_field=partial_field)} if has_rope else features
    )


def read_ministral3(fields: Fields) -> Features:
    """Read Ministral 3: Mistral with queries scaled by their position; the factor is one of YaRN's fields."""
    features = read(fields)
    (frequencies,) = features["positions"].frequencies
    check_query_scaling(fields, frequencies)
    return features


def write(model: ModelConfig) -> dict[str, Any]:
    """Return the config.json: Mistral's if the model has a window, Ministral 3's if it scales queries, else Llama's."""
    if frequencies_of(model).query_scaling:
        return write_shared(model, "ministral3", "Ministral3ForCausalLM", "sliding_window")
    if model.attention.window is not None:
        return write_shared(model, "mistral", "MistralForCausalLM", "sliding_window")
    return write_shared(model, "llama", "LlamaForCausalLM", "attention_bias", "mlp_bias")


def write_shared(
    model: ModelConfig, kind: str, architecture: str, *others: str, norm_field: str = "rms_norm_eps"
) -> dict[str, Any]:
    """Return the fields of config.json that Llama and the families derived from it share.

    Args:
        model: the model.
        kind: the `model_type`.
        architecture: the only entry of `architectures`.
        others: names of further fields to write: keys of `optional` in this function.
        norm_field: the field for the norms' epsilon.
    """
    frequencies, share = frequencies_of(model), rotary_share(model)
    optional = {
        **share,
        "attention_bias": model.biases.qkv,
        "mlp_bias": model.biases.mlp,
        "sliding_window": model.attention.window,
        "layer_types": layer_types(model),
        "pad_token_id": None,  # transformers' default may be outside a small vocabulary.
    }
    return {
        "architectures": [architecture],
        "model_type": kind,
        "num_hidden_layers": model.num_layers,
        "hidden_size": model.embed,
        "intermediate_size": model.mlp,
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.num_kv_heads,
        "head_dim": model.head_dim,
        "vocab_size": model.vocab,
        "tie_word_embeddings": model.tied_embeddings,
        "hidden_act": activation_name(model.activation),
        norm_field: model.norms.epsilon,
        "rope_theta": frequencies.theta,
        "rope_parameters": rope_parameters(frequencies) | (share if share.keys() & set(others) else {}),
        **longest_sequence(model),
        **{field: optional[field] for field in others},
    }


def layer_types(model: ModelConfig, windowed: str = "sliding_attention") -> list[str]:
    """Return transformers' name of each layer's attention: `full_attention`, or `windowed` if it has a window."""
    windows = of_layers(model.attention.windows, range(model.num_layers))
    return ["full_attention" if window is None else windowed for window in windows]


def preset(name: str, sizes: tuple[int, int, int, int, int, int], family: Family = LLAMA, **more: Any) -> ModelConfig:
    """Return a model config with these sizes: layers, embed, mlp, heads, kv heads, vocab.

    more: other fields of `ModelConfig`; head_dim is 128 by default.
    """
    layers, embed, mlp, heads, kv_heads, vocab = sizes
    return ModelConfig(
        name=name,
        family=family,
        num_layers=layers,
        embed=embed,
        mlp=mlp,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=more.pop("head_dim", 128),
        vocab=vocab,
        **more,
    )


TINY = (2, 128, 384, 8, 8, 256)
"""Sizes of the tiny presets, as in `preset`: a vocab of bytes, and 8 kv heads, so that tp may be 8."""

FAMILY = PublishedFamily(
    family=LLAMA,
    readers={"llama": read, "mistral": read, "ministral3": read_ministral3},
    names=names_of(LLAMA_NAMES),
    write=write,
    presets=(
        # A byte-level model that learns in minutes on a laptop.
        preset("tiny", TINY, head_dim=16),
        # Llama 2: arXiv:2307.09288 and the config.json published with the weights.
        preset("llama2-7b", (32, 4096, 11008, 32, 32, 32_000)),
        preset("llama2-13b", (40, 5120, 13824, 40, 40, 32_000)),
        preset("llama2-70b", (80, 8192, 28672, 64, 8, 32_000)),
        # Llama 3: arXiv:2407.21783, table 3, and the config.json published with the weights.
        preset("llama3-8b", (32, 4096, 14336, 32, 8, 128_256), positions=rotary(500_000.0)),
        preset("llama3-70b", (80, 8192, 28672, 64, 8, 128_256), positions=rotary(500_000.0)),
        preset("llama3-405b", (126, 16384, 53248, 128, 8, 128_256), positions=rotary(500_000.0)),
        # Mistral: arXiv:2310.06825, table 1.
        preset("mistral-7b", (32, 4096, 14336, 32, 8, 32_000), attention=AttentionConfig(windows=(4096,))),
    ),
)
