"""ERNIE 4.5 without experts: Llama whose rotary embedding pairs adjacent dims, with one field for all biases."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from meshwright.description.families import llama
from meshwright.description.families.family import LLAMA_NAMES, Features, PublishedFamily, names_of
from meshwright.description.families.fields import Fields
from meshwright.description.step.model import Biases, Family, ModelConfig

ERNIE4_5 = Family("ernie4_5")


def read(fields: Fields) -> Features:
    """Read Llama's fields, and whether matmuls have biases."""
    features, has_bias = llama.read(fields), fields.flag("use_bias", False)
    return features | {
        "biases": Biases(qkv=has_bias, output=has_bias, mlp=has_bias),
        "positions": replace(features["positions"], is_interleaved=True),
    }


def write(model: ModelConfig) -> dict[str, Any]:
    """Return the config.json of an ERNIE 4.5."""
    return llama.write_shared(model, "ernie4_5", "Ernie4_5ForCausalLM") | {"use_bias": model.biases.mlp}


FAMILY = PublishedFamily(family=ERNIE4_5, readers={"ernie4_5": read}, names=names_of(LLAMA_NAMES), write=write)
