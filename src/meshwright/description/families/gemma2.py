"""Gemma 2: norms after blocks too, caps of scores and logits, and a window in every second layer (arXiv:2408.00118)."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from meshwright.description.families import gemma, llama
from meshwright.description.families.family import LLAMA_NAMES, Features, PublishedFamily, names_of
from meshwright.description.families.fields import Fields
from meshwright.description.step.model import AttentionConfig, Family, ModelConfig, Scales

GEMMA2 = Family("gemma2")

NORMS = replace(gemma.NORMS, place="both")
_SCALES = Scales(attention_softcap=50.0, logits_softcap=30.0)

NAMES = names_of(
    {
        **LLAMA_NAMES,
        "layers.attention_post_norm": "model.layers.{layer}.post_attention_layernorm.weight",
        "layers.mlp_norm": "model.layers.{layer}.pre_feedforward_layernorm.weight",
        "layers.mlp_post_norm": "model.layers.{layer}.post_feedforward_layernorm.weight",
    }
)
"""Weight names. Llama's name of the norm before the MLP is in Gemma 2 that of the norm after attention."""


def read_capped(fields: Fields, *, every: int, has_rope: bool = True) -> Features:
    """Read the fields of Gemma 2 and 3, with soft caps of scores and logits.

    every: every n-th layer attends to all keys, if config.json has no `layer_types`.
    """
    features = gemma.read_shared(fields, NORMS, has_rope=has_rope)
    queries = fields.positive("query_pre_attn_scalar", float(features["head_dim"]))
    return features | {
        "activation": fields.activation("hidden_activation", "gelu_pytorch_tanh"),
        "attention": AttentionConfig(windows=fields.windows(features["num_layers"], every=every)),
        "scales": replace(
            features["scales"],
            attention=None if queries == features["head_dim"] else 1 / math.sqrt(queries),
            attention_softcap=fields.positive("attn_logit_softcapping", None),
            logits_softcap=fields.positive("final_logit_softcapping", None),
        ),
    }


def write_capped(model: ModelConfig, kind: str, architecture: str) -> dict[str, Any]:
    """Return the fields of the config.json of Gemma 2 and 3."""
    fields = llama.write_shared(model, kind, architecture, "attention_bias", "sliding_window", "layer_types")
    scales = model.scales
    queries = model.head_dim if scales.attention is None else round(scales.attention**-2)
    return fields | {
        "hidden_activation": fields.pop("hidden_act"),
        "query_pre_attn_scalar": queries,
        "attn_logit_softcapping": scales.attention_softcap,
        "final_logit_softcapping": scales.logits_softcap,
    }


def write(model: ModelConfig) -> dict[str, Any]:
    """Return the config.json of a Gemma 2."""
    return write_capped(model, "gemma2", "Gemma2ForCausalLM")


def read(fields: Fields) -> Features:
    """Read Gemma 2: the first of every two layers has the window."""
    return read_capped(fields, every=2)


FAMILY = PublishedFamily(
    family=GEMMA2,
    readers={"gemma2": read},
    names=NAMES,
    write=write,
    presets=(
        gemma.preset(
            "tiny-gemma2",
            llama.TINY,
            GEMMA2,
            head_dim=16,
            norms=NORMS,
            attention=AttentionConfig(windows=(32, None)),
            scales=_SCALES,
        ),
        # Gemma 2: arXiv:2408.00118, table 1, and the config.json of google/gemma-2-9b.
        gemma.preset(
            "gemma2-9b",
            (42, 3584, 14336, 16, 8, 256_000),
            GEMMA2,
            norms=NORMS,
            attention=AttentionConfig(windows=(4096, None)),
            scales=_SCALES,
        ),
    ),
)
