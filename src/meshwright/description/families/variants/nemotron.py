"""Nemotron and Minitron: LayerNorm with scales stored minus 1, squared ReLU without gate (arXiv:2402.16819)."""

from __future__ import annotations

from typing import Any

from meshwright.description.families import llama
from meshwright.description.families.family import LLAMA_NAMES, Features, PublishedFamily, names_of
from meshwright.description.families.fields import Fields
from meshwright.description.families.rope_fields import rotary_share
from meshwright.description.step.model import Family, ModelConfig

NEMOTRON = Family("nemotron")

_EPSILON = "norm_eps"


def read(fields: Fields) -> Features:
    """Read Llama's fields and the rotated fraction of a head."""
    fields.whole("num_key_value_heads")  # Without a default in transformers.
    features = llama.read(fields, partial_field="partial_rotary_factor", norm_field=_EPSILON)
    return features | {"norm": "layer", "norm_bias": True, "norm_offset": 1.0, "gated": False}


def write(model: ModelConfig) -> dict[str, Any]:
    """Return the config.json of a Nemotron."""
    fields = llama.write_shared(model, "nemotron", "NemotronForCausalLM", norm_field=_EPSILON)
    fields["rope_parameters"] |= rotary_share(model)
    return fields | rotary_share(model) | {"attention_bias": model.qkv_bias, "mlp_bias": model.mlp_bias}


FAMILY = PublishedFamily(family=NEMOTRON, readers={"nemotron": read}, names=names_of(LLAMA_NAMES), write=write)
