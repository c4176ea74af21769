"""Gemma: tied embeddings scaled by sqrt(embed), GeGLU, and norms that store their scale minus 1."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from meshwright.description.families import llama
from meshwright.description.families.family import LLAMA_NAMES, Features, PublishedFamily, names_of
from meshwright.description.families.fields import Fields
from meshwright.description.step.model import Family, ModelConfig, Norms, Scales

GEMMA = Family("gemma")

NORMS = Norms(offset=1.0, epsilon=1e-6)


def read_shared(fields: Fields, norms: Norms = NORMS, *, has_rope: bool = True) -> Features:
    """Read the fields that all versions of Gemma have. norms, has_rope: as in `llama.read`."""
    fields.only("use_bidirectional_attention", False)
    features = llama.read(fields, norms=norms, has_rope=has_rope)
    return features | {
        "scales": Scales(embedding=math.sqrt(features["embed"])),
        "tied_embeddings": fields.flag("tie_word_embeddings", True),
    }


def read(fields: Fields) -> Features:
    """Read Gemma. The activation is always GELU's tanh approximation; its two fields may also say `gelu`."""
    for field in ("hidden_act", "hidden_activation"):
        fields.only(field, "gelu", "gelu_pytorch_tanh")
    return read_shared(fields) | {"activation": "gelu_tanh"}


def write(model: ModelConfig) -> dict[str, Any]:
    """Return the config.json of a Gemma."""
    return llama.write_shared(model, "gemma", "GemmaForCausalLM", "attention_bias")


def preset(name: str, sizes: tuple[int, int, int, int, int, int], family: Family = GEMMA, **more: Any) -> ModelConfig:
    """Return a model as `llama.preset` does; heads have 256 dims by default."""
    given: dict[str, Any] = {"head_dim": 256, "norms": NORMS, "scales": Scales(), **more}
    given["scales"] = replace(given["scales"], embedding=math.sqrt(sizes[1]))
    return llama.preset(name, sizes, family, tied_embeddings=True, activation="gelu_tanh", **given)


FAMILY = PublishedFamily(
    family=GEMMA,
    readers={"gemma": read},
    names=names_of(LLAMA_NAMES),
    write=write,
    presets=(
        # Gemma: arXiv:2403.08295, table 1, and the config.json of google/gemma-7b.
        preset("gemma-7b", (28, 3072, 24576, 16, 16, 256_000)),
    ),
)
