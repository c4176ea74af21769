"""Phi-1, 1.5 and 2: attention and MLP in parallel after one LayerNorm, biases, rotary embedding on part of a head."""

from __future__ import annotations

from typing import Any

from meshwright.description.families import llama
from meshwright.description.families.family import LLAMA_NAMES, Features, PublishedFamily, names_of
from meshwright.description.families.fields import Fields
from meshwright.description.step.model import AttentionConfig, Biases, Family, ModelConfig, Norms

PHI = Family("phi")

_EPSILON = "layer_norm_eps"


def read(fields: Fields) -> Features:
    """Read Llama's fields, the rotated fraction of a head, and whether queries and keys have norms."""
    fields.only("tie_word_embeddings", False)
    fields.unused_options("resid_pdrop", "embd_pdrop")
    norms = Norms(kind="layer", has_bias=True)
    features = llama.read(fields, norms=norms, partial_field="partial_rotary_factor", norm_field=_EPSILON)
    if (dims := features["positions"].dims) % 2:
        raise fields.refusal(
            "hidden_size", f"a head of its num_attention_heads rotates {dims} dims, not an even number"
        )
    has_norm, width = fields.flag("qk_layernorm", False), features["embed"] // features["num_heads"]
    if has_norm and features["head_dim"] != width:
        raise fields.refusal("head_dim", f"with qk_layernorm it is hidden_size / num_attention_heads = {width}")
    return features | {
        "gated": False,
        "biases": Biases(qkv=True, output=True, mlp=True, unembedding=True),
        "attention": AttentionConfig(qk_norm="head" if has_norm else None),
        "parallel_blocks": "shared norm",
    }


def write(model: ModelConfig) -> dict[str, Any]:
    """Return the config.json of a Phi."""
    fields = llama.write_shared(model, "phi", "PhiForCausalLM", "partial_rotary_factor", norm_field=_EPSILON)
    return fields | {"qk_layernorm": model.attention.qk_norm is not None}


_LAYER = "model.layers.{layer}"
_MODULES = {
    "layers.attention_norm": f"{_LAYER}.input_layernorm",
    "layers.query_norm": f"{_LAYER}.self_attn.q_layernorm",
    "layers.key_norm": f"{_LAYER}.self_attn.k_layernorm",
    "layers.output": f"{_LAYER}.self_attn.dense",
    "layers.up": f"{_LAYER}.mlp.fc1",
    "layers.down": f"{_LAYER}.mlp.fc2",
    "final_norm": "model.final_layernorm",
    "unembedding": "lm_head",
}

FAMILY = PublishedFamily(
    family=PHI,
    readers={"phi": read},
    names=names_of(
        {
            **LLAMA_NAMES,
            **{ours: f"{theirs}.weight" for ours, theirs in _MODULES.items()},
            **{f"{ours}_bias": f"{theirs}.bias" for ours, theirs in _MODULES.items()},
        }
    ),
    write=write,
)
