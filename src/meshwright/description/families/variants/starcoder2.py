"""StarCoder2: LayerNorm, biases, an MLP without gate, tied embeddings and a sliding window (arXiv:2402.19173)."""

from __future__ import annotations

from typing import Any

from meshwright.description.families import llama
from meshwright.description.families.family import LLAMA_NAMES, Features, PublishedFamily, names_of
from meshwright.description.families.fields import Fields
from meshwright.description.step.model import Family, ModelConfig

STARCODER2 = Family("starcoder2")

_EPSILON = "norm_epsilon"


def read(fields: Fields) -> Features:
    """Read Llama's fields, and whether matmuls have biases."""
    biases = dict.fromkeys(("qkv_bias", "output_bias", "mlp_bias"), fields.flag("use_bias", True))
    # Fields of the released models, which transformers does not read; dropout is that of training.
    fields.only("mlp_type", "default")
    fields.only("norm_type", "layer_norm")
    fields.unused_options("residual_dropout", "embedding_dropout")
    return llama.read(fields, norm_field=_EPSILON) | biases | {"norm": "layer", "norm_bias": True, "gated": False}


def write(model: ModelConfig) -> dict[str, Any]:
    """Return the config.json of a StarCoder2."""
    return llama.write_shared(model, "starcoder2", "Starcoder2ForCausalLM", norm_field=_EPSILON) | {
        "use_bias": model.mlp_bias,
        "sliding_window": model.sliding_window,
    }


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
