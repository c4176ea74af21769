"""StarCoder2: LayerNorm, biases, an MLP without gate, tied embeddings and a sliding window (arXiv:2402.19173)."""

from __future__ import annotations

from typing import Any

from meshwright.description.families import llama
from meshwright.description.families.family import LLAMA_NAMES, Features, PublishedFamily, names_of
from meshwright.description.families.fields import Fields
from meshwright.description.step.model import Biases, Family, ModelConfig, Norms

STARCODER2 = Family("starcoder2")

_EPSILON = "norm_epsilon"


def read(fields: Fields) -> Features:
    """Read Llama's fields, and whether matmuls have biases."""
    has_bias, norms = fields.flag("use_bias", True), Norms(kind="layer", has_bias=True)
    # The released models' files have these fields, which transformers does not read, or uses only in training.
    fields.only("mlp_type", "default")
    fields.only("norm_type", "layer_norm")
    fields.unused_options("residual_dropout", "embedding_dropout")
    features = llama.read(fields, norms=norms, norm_field=_EPSILON)
    return features | {"biases": Biases(qkv=has_bias, output=has_bias, mlp=has_bias), "gated": False}


def write(model: ModelConfig) -> dict[str, Any]:
    """Return the config.json of a StarCoder2."""
    kind, architecture = "starcoder2", "Starcoder2ForCausalLM"
    fields = llama.write_shared(model, kind, architecture, "sliding_window", norm_field=_EPSILON)
    return fields | {"use_bias": model.biases.mlp}


FAMILY = PublishedFamily(
    family=STARCODER2,
    readers={"starcoder2": read},
    names=names_of(
        {
            **LLAMA_NAMES,
            "layers.up": "model.layers.{layer}.mlp.c_fc.weight",
            "layers.up_bias": "model.layers.{layer}.mlp.c_fc.bias",
            "layers.down": "model.layers.{layer}.mlp.c_proj.weight",
            "layers.down_bias": "model.layers.{layer}.mlp.c_proj.bias",
        }
    ),
    write=write,
)
