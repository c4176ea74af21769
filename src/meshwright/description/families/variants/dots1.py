"""dots.llm1: DeepSeek-V3's experts with Qwen3's attention (arXiv:2506.05767)."""

from __future__ import annotations

from typing import Any

from meshwright.description.families import llama
from meshwright.description.families.deepseek import SHARED_EXPERT_NAMES, read_experts, sigmoid_routing, write_experts
from meshwright.description.families.family import LLAMA_NAMES, Features, PublishedFamily, names_of
from meshwright.description.families.fields import Fields
from meshwright.description.step.model import AttentionConfig, Family, ModelConfig

DOTS1 = Family("dots1")


def read(fields: Fields) -> Features:
    """Read Llama's fields, the experts, and the window, which layers from `max_window_layers` on have."""
    layers, first = fields.whole("num_hidden_layers"), fields.whole("max_window_layers", 62, least=0)
    return llama.read(fields) | {
        "attention": AttentionConfig(windows=fields.windows(layers, full=range(first)), qk_norm="head"),
        "experts": read_experts(fields, sigmoid_routing(fields)),
    }


def write(model: ModelConfig) -> dict[str, Any]:
    """Return the config.json of a dots.llm1."""
    assert model.experts is not None
    others = ("attention_bias", "sliding_window", "layer_types")
    return llama.write_shared(model, "dots1", "Dots1ForCausalLM", *others) | write_experts(model.experts)


FAMILY = PublishedFamily(
    family=DOTS1,
    readers={"dots1": read},
    names=names_of({**LLAMA_NAMES, **SHARED_EXPERT_NAMES}),
    write=write,
)
