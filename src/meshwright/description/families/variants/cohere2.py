"""Command R7B and A: attention and MLP in parallel after one norm; only layers with a window have rotary embedding."""

from __future__ import annotations

from typing import Any

from meshwright.description.families import llama
from meshwright.description.families.family import LLAMA_NAMES, Features, PublishedFamily, names_of
from meshwright.description.families.fields import Fields, full_layers, unrotated
from meshwright.description.step.model import Family, ModelConfig

COHERE2 = Family("cohere2")

_EPSILON = "layer_norm_eps"


def read(fields: Fields) -> Features:
    """Read Llama's fields, the windows and the factor of logits."""
    features = llama.read(fields, norm_field=_EPSILON)
    features |= fields.windows(features["num_layers"], every=fields.whole("sliding_window_pattern", 4))
    # Fields of the released models, which transformers does not read.
    for field, value in _RELEASED.items():
        fields.only(field, value)
    fields.unused_options("layer_switch", "use_embedding_sharing", "use_parallel_embedding")
    return (
        features
        | unrotated(full_layers(features), features["num_layers"])
        | {
            "norm": "layer",
            "parallel_blocks": True,
            "shared_norm": True,
            "rotary_interleaved": True,
            "logits_scale": fields.positive("logit_scale"),
        }
    )


_RELEASED: dict[str, Any] = {
    "order_of_interleaved_layers": "local_attn_first",
    "position_embedding_type": "rope_gptj",
    "rotary_pct": 1.0,
    "use_gated_activation": True,
    "use_parallel_block": True,
}


def write(model: ModelConfig) -> dict[str, Any]:
    """Return the config.json of a Command R."""
    return llama.write_shared(model, "cohere2", "Cohere2ForCausalLM", norm_field=_EPSILON) | {
        "attention_bias": model.qkv_bias,
        "logit_scale": model.logits_scale,
        "sliding_window": model.sliding_window,
        "layer_types": llama.layer_types(model),
    }


FAMILY = PublishedFamily(family=COHERE2, readers={"cohere2": read}, names=names_of(LLAMA_NAMES), write=write)
