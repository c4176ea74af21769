"""Qwen3 and Qwen3-MoE: Llama with a norm of each query and key head."""

from __future__ import annotations

from typing import Any

from meshwright.description.families import llama
from meshwright.description.families.family import EXPERT_NAMES, LLAMA_NAMES, Features, PublishedFamily, names_of
from meshwright.description.families.fields import Fields
from meshwright.description.families.qwen2 import read_experts, windows_of, write_experts, write_windows
from meshwright.description.step.model import AttentionConfig, Experts, Family, ModelConfig, Norms, rotary

QWEN3 = Family("qwen3")


def read(fields: Fields) -> Features:
    """Read Llama's fields, the window if enabled, and norms of queries and keys."""
    features = llama.read(fields)
    windows = windows_of(fields, features["num_layers"])
    return features | {"attention": AttentionConfig(windows=windows, qk_norm="head")}


def read_moe(fields: Fields) -> Features:
    """Read Qwen3-MoE: an enabled window is in every layer, whatever `max_window_layers` is."""
    features = llama.read(fields)
    fields.unused_options("max_window_layers")
    windows = fields.windows(features["num_layers"], is_on=fields.flag("use_sliding_window", False))
    attention = AttentionConfig(windows=windows, qk_norm="head")
    return features | {"attention": attention} | read_experts(fields, features)


def write(model: ModelConfig) -> dict[str, Any]:
    """Return the config.json of a Qwen3, with experts or without."""
    kind, architecture = ("qwen3_moe", "Qwen3MoeForCausalLM") if model.experts else ("qwen3", "Qwen3ForCausalLM")
    fields = llama.write_shared(model, kind, architecture, "attention_bias") | write_windows(model)
    return fields | (write_experts(model, model.experts) if model.experts else {})


_FEATURES: dict[str, Any] = {"attention": AttentionConfig(qk_norm="head"), "norms": Norms(epsilon=1e-6)}

FAMILY = PublishedFamily(
    family=QWEN3,
    readers={"qwen3": read, "qwen3_moe": read_moe},
    names=names_of({**LLAMA_NAMES, **EXPERT_NAMES}),
    write=write,
    presets=(
        llama.preset("tiny-qwen3", llama.TINY, QWEN3, head_dim=16, **_FEATURES),
        # Qwen3: arXiv:2505.09388, table 1, and the config.json of Qwen/Qwen3-8B.
        llama.preset(
            "qwen3-8b",
            (36, 4096, 12288, 32, 8, 151_936),
            QWEN3,
            **_FEATURES,
            positions=rotary(1_000_000.0),
        ),
        # Qwen3-30B-A3B: arXiv:2505.09388, table 2, and the config.json of Qwen/Qwen3-30B-A3B.
        llama.preset(
            "qwen3-30b-a3b",
            (48, 2048, 6144, 32, 4, 151_936),
            QWEN3,
            **_FEATURES,
            positions=rotary(1_000_000.0),
            experts=Experts(count=128, num_active=8, mlp=768),
        ),
    ),
)
