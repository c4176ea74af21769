"""OLMoE: experts in every layer, and norms over all query heads and over all key heads (arXiv:2409.02060)."""

from __future__ import annotations

from typing import Any

from meshwright.description.families import llama
from meshwright.description.families.family import EXPERT_NAMES, LLAMA_NAMES, Features, PublishedFamily, names_of
from meshwright.description.families.fields import Fields
from meshwright.description.step.layer import Routing
from meshwright.description.step.model import AttentionConfig, Experts, Family, ModelConfig

OLMOE = Family("olmoe")


def read(fields: Fields) -> Features:
    """Read Llama's fields and the experts. Clipping of queries, keys and values is not supported."""
    features = llama.read(fields)
    fields.only("clip_qkv")
    fields.only("head_dim", features["embed"] // features["num_heads"])
    count = fields.whole("num_local_experts", None) or fields.whole("num_experts")
    fields.only("num_experts", count)
    experts = Experts(
        count=count,
        num_active=fields.whole("num_experts_per_tok"),
        mlp=features["mlp"],
        routing=Routing(is_normed=fields.flag("norm_topk_prob", False)),
    )
    return features | {"attention": AttentionConfig(qk_norm="all heads"), "experts": experts}


def write(model: ModelConfig) -> dict[str, Any]:
    """Return the config.json of an OLMoE."""
    assert model.experts is not None
    return llama.write_shared(model, "olmoe", "OlmoeForCausalLM", "attention_bias", "pad_token_id") | {
        "intermediate_size": model.experts.mlp,
        "num_experts": model.experts.count,
        "num_experts_per_tok": model.experts.num_active,
        "norm_topk_prob": model.experts.routing.is_normed,
    }


FAMILY = PublishedFamily(
    family=OLMOE, readers={"olmoe": read}, names=names_of({**LLAMA_NAMES, **EXPERT_NAMES}), write=write
)
