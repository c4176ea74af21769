"""Nemotron and Minitron: LayerNorm with scales stored minus 1, squared ReLU without gate (arXiv:2402.16819)."""

from __future__ import annotations

from typing import Any

from meshwright.description.families import llama
from meshwright.description.families.family import LLAMA_NAMES, Features, PublishedFamily, names_of
from meshwright.description.families.fields import Fields
from meshwright.description.step.model import Family, ModelConfig, Norms

NEMOTRON = Family("nemotron")

_EPSILON = "norm_eps"


def read(fields: Fields) -> Features:
    """Read Llama's fields and the rotated fraction of a head."""
    fields.whole("num_key_value_heads")  # Required: transformers has no default.
    norms = Norms(kind="layer", has_bias=True, offset=1.0)
    features = llama.read(fields, norms=norms, partial_field="partial_rotary_factor", norm_field=_EPSILON)
    return features | {"gated": False}


def write(model: ModelConfig) -> dict[str, Any]:
    """Return the config.json of a Nemotron."""
    others = ("attention_bias", "mlp_bias", "partial_rotary_factor")
    return llama.write_shared(model, "nemotron", "NemotronForCausalLM", *others, norm_field=_EPSILON)


FAMILY = PublishedFamily(family=NEMOTRON, readers={"nemotron": read}, names=names_of(LLAMA_NAMES), write=write)
