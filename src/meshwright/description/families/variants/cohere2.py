"""Command R7B and A: attention and MLP in parallel after one norm; only layers with a window have rotary embedding."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from meshwright.description.families import llama
from meshwright.description.families.family import LLAMA_NAMES, Features, PublishedFamily, names_of
from meshwright.description.families.fields import Fields
from meshwright.description.families.rope_fields import rotated_where
from meshwright.description.step.layer import of_layers
from meshwright.description.step.model import AttentionConfig, Family, ModelConfig, Norms, Scales

COHERE2 = Family("cohere2")

_EPSILON = "layer_norm_eps"


def read(fields: Fields) -> Features:
    """Read Llama's fields, the windows and the factor of the logits."""
    features = llama.read(fields, norms=Norms(kind="layer"), norm_field=_EPSILON)
    layers = range(features["num_layers"])
    windows = fields.windows(len(layers), every=fields.whole("sliding_window_pattern", 4))
    # The released models' files have these fields, which transformers does not read.
    for field, value in _RELEASED.items():
        fields.only(field, value)
    fields.unused_options("layer_switch", "use_embedding_sharing", "use_parallel_embedding")
    positions = replace(features["positions"], is_interleaved=True)
    return features | {
        "attention": AttentionConfig(windows=windows),
        "positions": rotated_where(positions, (window is not None for window in of_layers(windows, layers))),
        "parallel_blocks": "shared norm",
        "scales": Scales(logits=fields.positive("logit_scale")),
    }


_RELEASED: dict[str, Any] = {
    "order_of_interleaved_layers": "local_attn_first",
    "position_embedding_type": "rope_gptj",
    "rotary_pct": 1.0,
    "use_gated_activation": True,
    "use_parallel_block": True,
}


def write(model: ModelConfig) -> dict[str, Any]:
    """Return the config.json of a Command R."""
    others = ("attention_bias", "sliding_window", "layer_types")
    fields = llama.write_shared(model, "cohere2", "Cohere2ForCausalLM", *others, norm_field=_EPSILON)
    return fields | {"logit_scale": model.scales.logits}


FAMILY = PublishedFamily(family=COHERE2, readers={"cohere2": read}, names=names_of(LLAMA_NAMES), write=write)
