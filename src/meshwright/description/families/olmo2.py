"""OLMo 2: norms only after blocks, and norms over all query heads and over all key heads (arXiv:2501.00656).

OLMo 3 adds a sliding window in three of four layers.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from meshwright.description.families import llama
from meshwright.description.families.family import LLAMA_NAMES, Features, PublishedFamily, names_of
from meshwright.description.families.fields import Fields
from meshwright.description.families.rope_fields import read_rotary_by_window, rope_by_layer
from meshwright.description.step.model import AttentionConfig, Family, ModelConfig, Norms, rotary

OLMO2 = Family("olmo2")

_ATTENTION = AttentionConfig(qk_norm="all heads")
NORMS = Norms(place="after", epsilon=1e-6)


def read(fields: Fields) -> Features:
    """Read Llama's fields."""
    return llama.read(fields, norms=NORMS) | {"attention": _ATTENTION}


def read_olmo3(fields: Fields) -> Features:
    """Read OLMo 3: every fourth layer attends to all keys, and frequencies are scaled in these layers only."""
    features = llama.read(fields, norms=NORMS, has_rope=False)
    features["attention"] = replace(_ATTENTION, windows=fields.windows(features["num_layers"], every=4))
    fields.only("rope_local_base_freq")
    positions = read_rotary_by_window(fields, features, theta=500_000.0, local_theta=500_000.0)
    return features | {"positions": positions}


def write(model: ModelConfig) -> dict[str, Any]:
    """Return the config.json of an OLMo 2, or of an OLMo 3 if the model has a window."""
    if model.attention.window is None:
        return llama.write_shared(model, "olmo2", "Olmo2ForCausalLM", "attention_bias")
    others = ("attention_bias", "sliding_window", "layer_types", "pad_token_id")
    return llama.write_shared(model, "olmo3", "Olmo3ForCausalLM", *others) | rope_by_layer(model)


NAMES = names_of(
    {
        **LLAMA_NAMES,
        "layers.attention_post_norm": "model.layers.{layer}.post_attention_layernorm.weight",
        "layers.mlp_post_norm": "model.layers.{layer}.post_feedforward_layernorm.weight",
    }
)

FAMILY = PublishedFamily(
    family=OLMO2,
    readers={"olmo2": read, "olmo3": read_olmo3},
    names=NAMES,
    write=write,
    presets=(
        llama.preset("tiny-olmo2", llama.TINY, OLMO2, head_dim=16, norms=NORMS, attention=_ATTENTION),
        # OLMo 2: arXiv:2501.00656, table 2, and the config.json of allenai/OLMo-2-1124-7B.
        llama.preset(
            "olmo2-7b",
            (32, 4096, 11008, 32, 32, 100_352),
            OLMO2,
            norms=NORMS,
            attention=_ATTENTION,
            positions=rotary(500_000.0),
        ),
    ),
)
