"""OLMo 2: norms only after blocks, and norms over all query heads and over all key heads (arXiv:2501.00656).

OLMo 3 adds a sliding window in three of four layers.
"""

from __future__ import annotations

from typing import Any

from meshwright.description.families import llama
from meshwright.description.families.family import LLAMA_NAMES, Features, PublishedFamily, names_of
from meshwright.description.families.fields import Fields
from meshwright.description.families.rope_fields import read_rope_by_layer, read_rotary_dims, rope_by_layer
from meshwright.description.step.model import Family, ModelConfig

OLMO2 = Family("olmo2")

_NORMS: dict[str, Any] = {"qk_norm": True, "qk_norm_over_heads": True, "pre_norms": False, "post_norms": True}


def read(fields: Fields) -> Features:
    """Read Llama's fields."""
    return llama.read(fields) | _NORMS


def read_olmo3(fields: Fields) -> Features:
    """Read OLMo 3: every fourth layer attends to all keys, and frequencies are scaled in these layers only."""
    features = llama.read(fields, has_rope=False)
    features |= fields.windows(features["num_layers"], every=4)
    fields.only("rope_local_base_freq")
    full, local = read_rope_by_layer(fields, theta=500_000.0, local_theta=500_000.0)
    read_rotary_dims(fields, full, features["head_dim"])
    is_local = features["sliding_window"] and (full.scaling or full.theta != local)
    rope = {"rope_theta": full.theta, "rope_scaling": full.scaling, "rope_theta_local": local if is_local else None}
    return features | rope | _NORMS


def write(model: ModelConfig) -> dict[str, Any]:
    """Return the config.json of an OLMo 2, or of an OLMo 3 if the model has a window."""
    if model.sliding_window is None:
        fields = llama.write_shared(model, "olmo2", "Olmo2ForCausalLM")
        return fields | {"attention_bias": model.qkv_bias}
    return (
        llama.write_shared(model, "olmo3", "Olmo3ForCausalLM")
        | rope_by_layer(model)
        | {
            "attention_bias": model.qkv_bias,
            "sliding_window": model.sliding_window,
            "layer_types": llama.layer_types(model),
            # A token of a larger vocabulary by default.
            "pad_token_id": None,
        }
    )


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
        llama.preset("tiny-olmo2", llama.TINY, OLMO2, head_dim=16, norm_epsilon=1e-6, **_NORMS),
        # OLMo 2: arXiv:2501.00656, table 2, and the config.json of allenai/OLMo-2-1124-7B.
        llama.preset(
            "olmo2-7b",
            (32, 4096, 11008, 32, 32, 100_352),
            OLMO2,
            rope_theta=500_000.0,
            norm_epsilon=1e-6,
            **_NORMS,
        ),
    ),
)
