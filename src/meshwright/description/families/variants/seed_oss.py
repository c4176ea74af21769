"""Seed-OSS: Llama with biases of queries, keys and values; attention's output bias has a field of its own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from meshwright.description.families import llama
from meshwright.description.families.family import LLAMA_NAMES, Features, PublishedFamily, names_of
from meshwright.description.families.fields import Fields
from meshwright.description.step.model import Family, ModelConfig

SEED_OSS = Family("seed_oss")


def read(fields: Fields) -> Features:
    """Read Llama's fields, and the bias of attention's output."""
    fields.unused_options("residual_dropout")
    features = llama.read(fields)
    return features | {"biases": replace(features["biases"], output=fields.flag("attention_out_bias", False))}


def write(model: ModelConfig) -> dict[str, Any]:
    """Return the config.json of a Seed-OSS."""
    fields = llama.write_shared(model, "seed_oss", "SeedOssForCausalLM", "attention_bias", "mlp_bias")
    return fields | {"attention_out_bias": model.biases.output}


FAMILY = PublishedFamily(family=SEED_OSS, readers={"seed_oss": read}, names=names_of(LLAMA_NAMES), write=write)
