"""EXAONE 4: norms after blocks and of each query and key head; layers without a window have no rotary embedding."""

from __future__ import annotations

from typing import Any

from meshwright.description.families import llama, olmo2
from meshwright.description.families.family import Features, PublishedFamily
from meshwright.description.families.fields import Fields, full_layers, unrotated
from meshwright.description.step.model import Family, ModelConfig

EXAONE4 = Family("exaone4")


def read(fields: Fields) -> Features:
    """Read Llama's fields and windows; a model without a window has rotary embedding in all layers."""
    layers, every = fields.whole("num_hidden_layers"), 4
    if fields.value("layer_types", None) is None:
        every = fields.whole("sliding_window_pattern", every)
    fields.unused_options("sliding_window_pattern")
    features = llama.read(fields) | fields.windows(layers, every=every)
    is_hybrid = fields.value("sliding_window", None) is not None
    norms = {"qk_norm": True, "pre_norms": False, "post_norms": True}
    return features | norms | unrotated(full_layers(features) if is_hybrid else (), layers)


def write(model: ModelConfig) -> dict[str, Any]:
    """Return the config.json of an EXAONE 4."""
    return llama.write_shared(model, "exaone4", "Exaone4ForCausalLM") | {
        "sliding_window": model.sliding_window,
        "layer_types": llama.layer_types(model),
    }


FAMILY = PublishedFamily(family=EXAONE4, readers={"exaone4": read}, names=olmo2.NAMES, write=write)
