"""EXAONE 4: norms after blocks and of each query and key head; layers without a window have no rotary embedding."""

from __future__ import annotations

from typing import Any

from meshwright.description.families import llama, olmo2
from meshwright.description.families.family import Features, PublishedFamily
from meshwright.description.families.fields import Fields
from meshwright.description.families.rope_fields import rotated_where
from meshwright.description.step.layer import of_layers
from meshwright.description.step.model import AttentionConfig, Family, ModelConfig

EXAONE4 = Family("exaone4")


def read(fields: Fields) -> Features:
    """Read Llama's fields and windows; a model without a window has rotary embedding in all layers."""
    layers, every = fields.whole("num_hidden_layers"), 4
    if fields.value("layer_types", None) is None:
        every = fields.whole("sliding_window_pattern", every)
    fields.unused_options("sliding_window_pattern")
    features, windows = llama.read(fields, norms=olmo2.NORMS), fields.windows(layers, every=every)
    is_hybrid = fields.value("sliding_window", None) is not None
    rotates = (not is_hybrid or window is not None for window in of_layers(windows, range(layers)))
    return features | {
        "attention": AttentionConfig(windows=windows, qk_norm="head"),
        "positions": rotated_where(features["positions"], rotates),
    }


def write(model: ModelConfig) -> dict[str, Any]:
    """Return the config.json of an EXAONE 4."""
    return llama.write_shared(model, "exaone4", "Exaone4ForCausalLM", "sliding_window", "layer_types")


FAMILY = PublishedFamily(family=EXAONE4, readers={"exaone4": read}, names=olmo2.NAMES, write=write)
