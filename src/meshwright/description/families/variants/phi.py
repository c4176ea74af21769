"""Phi-1, 1.5 and 2: attention and MLP in parallel after one LayerNorm, biases, rotary embedding on part of a head."""

from __future__ import annotations

from typing import Any

from meshwright.description.families import llama
from meshwright.description.families.family import LLAMA_NAMES, Features, PublishedFamily, names_of
from meshwright.description.families.fields import Fields
from meshwright.description.families.rope_fields import rotary_share
from meshwright.description.step.model import Family, ModelConfig

PHI = Family("phi")

_EPSILON = "layer_norm_eps"


def read(fields: Fields) -> Features:
    """Read Llama's fields, the rotated fraction of a head, and whether queries and keys are normed."""
    fields.only("tie_word_embeddings", False)
    fields.unused_options("resid_pdrop", "embd_pdrop")
    features = llama.read(fields, partial_field="partial_rotary_factor", norm_field=_EPSILON)
    if (dims := features["rotary_dims"]) % 2:
        raise fields.refusal(
            "hidden_size", f"a head of its num_attention_heads rotates {dims} dims, not an even number"
        )
    qk_norm, width = fields.flag("qk_layernorm", False), features["embed"] // features["num_heads"]
    if qk_norm and features["head_dim"] != width:
        raise fields.refusal("head_dim", f"with qk_layernorm it is hidden_size / num_attention_heads = {width}")
    biases = dict.fromkeys(("qkv_bias", "output_bias", "mlp_bias", "unembedding_bias"), True)
    norms = {"norm": "layer", "norm_bias": True, "qk_norm": qk_norm}
    return features | biases | norms | {"gated": False, "parallel_blocks": True, "shared_norm": True}


def write(model: ModelConfig) -> dict[str, Any]:
    """Return the config.json of a Phi."""
    fields = llama.write_shared(model, "phi", "PhiForCausalLM", norm_field=_EPSILON)
    fields["rope_parameters"] |= rotary_share(model)
    return fields | rotary_share(model) | {"qk_layernorm": model.qk_norm}


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
