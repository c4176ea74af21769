"""GLM-4: norms before and after blocks, and rotary embedding of adjacent dims in half of each head."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from meshwright.description.families import llama
from meshwright.description.families.family import (
    GATE_UP_PROJ,
    LLAMA_NAMES,
    Features,
    PublishedFamily,
    fused,
    names_of,
)
from meshwright.description.families.fields import Fields
from meshwright.description.step.model import Family, ModelConfig, Norms

GLM4 = Family("glm4")


def read(fields: Fields) -> Features:
    """Read Llama's fields and the rotated fraction of a head; attention's output has no bias."""
    features = llama.read(fields, norms=Norms(place="both"), partial_field="partial_rotary_factor")
    return features | {
        "biases": replace(features["biases"], output=False),
        "positions": replace(features["positions"], is_interleaved=True),
    }


def write(model: ModelConfig) -> dict[str, Any]:
    """Return the config.json of a GLM-4."""
    others = ("attention_bias", "partial_rotary_factor", "pad_token_id")
    return llama.write_shared(model, "glm4", "Glm4ForCausalLM", *others)


FAMILY = PublishedFamily(
    family=GLM4,
    readers={"glm4": read},
    names=fused(
        names_of(
            {
                **LLAMA_NAMES,
                "layers.attention_post_norm": "model.layers.{layer}.post_self_attn_layernorm.weight",
                "layers.mlp_post_norm": "model.layers.{layer}.post_mlp_layernorm.weight",
            }
        ),
        GATE_UP_PROJ,
    ),
    write=write,
)
