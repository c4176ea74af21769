"""OLMo 2: norms only after blocks, and norms over all query heads and over all key heads (arXiv:2501.00656)."""

from __future__ import annotations

from typing import Any

from meshwright.description.families import llama
from meshwright.description.families.family import LLAMA_NAMES, Features, PublishedFamily, names_of
from meshwright.description.families.fields import Fields
from meshwright.description.step.model import Family, ModelConfig

OLMO2 = Family("olmo2")

_NORMS: dict[str, Any] = {"qk_norm": True, "qk_norm_over_heads": True, "pre_norms": False, "post_norms": True}


def read(fields: Fields) -> Features:
    """Read Llama's fields."""
    return llama.read(fields) | _NORMS


def write(model: ModelConfig) -> dict[str, Any]:
    """Return the config.json of an OLMo 2."""
    fields = llama.write_shared(model, "olmo2", "Olmo2ForCausalLM")
    return fields | {"attention_bias": model.qkv_bias}


FAMILY = PublishedFamily(
    family=OLMO2,
    readers={"olmo2": read},
    names=names_of(
        {
            **LLAMA_NAMES,
            "layers.attention_post_norm": "model.layers.{layer}.post_attention_layernorm.weight",
            "layers.mlp_post_norm": "model.layers.{layer}.post_feedforward_layernorm.weight",
        }
    ),
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
