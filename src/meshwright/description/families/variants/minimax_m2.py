"""MiniMax-M2: Mixtral's experts, chosen by sigmoids with a bias; norms over all query heads and over all key heads."""

from __future__ import annotations

from typing import Any

from meshwright.description.families import llama
from meshwright.description.families.family import LLAMA_NAMES, Features, PublishedFamily, names_of
from meshwright.description.families.fields import Fields
from meshwright.description.families.mixtral import EXPERT_NAMES
from meshwright.description.families.rope_fields import read_rope, read_rotary_dims
from meshwright.description.step.layer import Routing
from meshwright.description.step.model import AttentionConfig, Experts, Family, ModelConfig, RotaryPositions

MINIMAX_M2 = Family("minimax_m2")

ROUTING = Routing(scores="sigmoid", has_choice_bias=True)


def read(fields: Fields) -> Features:
    """Read Llama's fields, the experts, and the rotated dims of a head, which released files give as a number."""
    features = llama.read(fields, has_rope=False)
    fields.only("scoring_func", "sigmoid")
    fields.only("use_qk_norm", True)
    fields.only("use_routing_bias", True)
    fields.only("qk_norm_type", "per_layer")
    fields.only("shared_intermediate_size", 0)
    # transformers does not read these fields of the released files, on layers of an earlier model and multi-token
    # prediction.
    fields.unused_options("attn_type_list", "mlp_intermediate_size", "shared_moe_mode")
    fields.unused_options("layernorm_full_attention_beta", "layernorm_linear_attention_beta", "layernorm_mlp_beta")
    fields.unused_options("use_mtp", "num_mtp_modules", "mtp_transformer_layers")
    share = fields.whole("rotary_dim", features["head_dim"]) / features["head_dim"]
    rope = read_rope(fields, partial=share, partial_field="partial_rotary_factor")
    # transformers reads the two names as one field.
    count = fields.whole("num_local_experts", None) or fields.whole("num_experts")
    fields.only("num_experts", count)
    experts = Experts(count=count, num_active=fields.whole("num_experts_per_tok"), mlp=features["mlp"], routing=ROUTING)
    return features | {
        "attention": AttentionConfig(qk_norm="all heads"),
        "positions": RotaryPositions(
            frequencies=(rope.frequencies,), dims=read_rotary_dims(fields, rope, features["head_dim"])
        ),
        "experts": experts,
    }


def write(model: ModelConfig) -> dict[str, Any]:
    """Return the config.json of a MiniMax-M2."""
    assert model.experts is not None
    return llama.write_shared(model, "minimax_m2", "MiniMaxM2ForCausalLM", "partial_rotary_factor") | {
        "intermediate_size": model.experts.mlp,
        "num_local_experts": model.experts.count,
        "num_experts_per_tok": model.experts.num_active,
    }


FAMILY = PublishedFamily(
    family=MINIMAX_M2,
    readers={"minimax_m2": read},
    names=names_of({**LLAMA_NAMES, **EXPERT_NAMES})
    | names_of({"layers.choice_bias": "model.layers.{layer}.block_sparse_moe.e_score_correction_bias"}),
    write=write,
)
