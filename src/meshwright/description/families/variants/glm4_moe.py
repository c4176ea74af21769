"""GLM-4.5: DeepSeek-V3's experts with grouped-query attention, and rotary embedding on half of each head."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from meshwright.description.families import llama
from meshwright.description.families.deepseek import SHARED_EXPERT_NAMES, read_experts, sigmoid_routing, write_experts
from meshwright.description.families.family import LLAMA_NAMES, Features, PublishedFamily, names_of
from meshwright.description.families.fields import Fields
from meshwright.description.step.model import AttentionConfig, Family, ModelConfig

GLM4_MOE = Family("glm4_moe")


def read(fields: Fields) -> Features:
    """Read Llama's fields, the rotated fraction of a head and the experts; attention's output has no bias."""
    fields.unused_options("num_nextn_predict_layers", "num_mtp_layers")
    features = llama.read(fields, partial_field="partial_rotary_factor")
    return features | {
        "biases": replace(features["biases"], output=False),
        "attention": AttentionConfig(qk_norm="head" if fields.flag("use_qk_norm", False) else None),
        "experts": read_experts(fields, sigmoid_routing(fields)),
    }


def write(model: ModelConfig) -> dict[str, Any]:
    """Return the config.json of a GLM-4.5."""
    assert model.experts is not None
    others = ("attention_bias", "partial_rotary_factor")
    return llama.write_shared(model, "glm4_moe", "Glm4MoeForCausalLM", *others) | {
        **write_experts(model.experts),
        "use_qk_norm": model.attention.qk_norm is not None,
        "num_nextn_predict_layers": 0,
    }


FAMILY = PublishedFamily(
    family=GLM4_MOE,
    readers={"glm4_moe": read},
    names=names_of({**LLAMA_NAMES, **SHARED_EXPERT_NAMES}),
    write=write,
    buffers=(r"^model\.layers\.(46|92)\.",),  # The multi-token prediction modules of the two released sizes.
)
