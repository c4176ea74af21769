"""SmolLM3: Llama with every fourth layer without rotary embedding (huggingface.co/blog/smollm3, arXiv:2501.18795)."""

from __future__ import annotations

from typing import Any

from meshwright.description.families import llama
from meshwright.description.families.family import LLAMA_NAMES, Features, PublishedFamily, names_of
from meshwright.description.families.fields import Fields
from meshwright.description.families.rope_fields import rotated_layers, rotated_where
from meshwright.description.step.layer import of_layers
from meshwright.description.step.model import AttentionConfig, Family, ModelConfig, RotaryPositions

SMOLLM3 = Family("smollm3")


def read(fields: Fields) -> Features:
    """Read Llama's fields, the layers without rotary embedding, and the window, which only these layers have."""
    layers = fields.whole("num_hidden_layers")
    rotates = rotated_layers(fields, layers)
    is_on, rotated = fields.flag("use_sliding_window", False), [n for n in range(layers) if rotates[n]]
    features = llama.read(fields)
    return features | {
        "attention": AttentionConfig(windows=fields.windows(layers, full=rotated, is_on=is_on)),
        "positions": rotated_where(features["positions"], rotates),
    }


def write(model: ModelConfig) -> dict[str, Any]:
    """Return the config.json of a SmolLM3."""
    positions = model.positions if isinstance(model.positions, RotaryPositions) else RotaryPositions()
    by_layer = of_layers(positions.frequencies, range(model.num_layers))
    others = ("attention_bias", "mlp_bias", "sliding_window", "layer_types", "pad_token_id")
    return llama.write_shared(model, "smollm3", "SmolLM3ForCausalLM", *others) | {
        "no_rope_layers": [int(not frequencies.is_identity) for frequencies in by_layer],
        "use_sliding_window": model.attention.window is not None,
    }


FAMILY = PublishedFamily(family=SMOLLM3, readers={"smollm3": read}, names=names_of(LLAMA_NAMES), write=write)
