"""gpt-oss: attention sinks, windows in every second layer, biases, a clamped SwiGLU of experts (arXiv:2508.10925)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from meshwright.description.families import llama
from meshwright.description.families.family import LLAMA_NAMES, Features, Published, PublishedFamily, names_of
from meshwright.description.families.fields import Fields
from meshwright.description.step.frequencies import YarnRopeScaling
from meshwright.description.step.layer import ClampedSwiglu
from meshwright.description.step.model import AttentionConfig, Biases, Experts, Family, ModelConfig, rotary

GPT_OSS = Family("gpt_oss")

_YARN = YarnRopeScaling(factor=32.0, original_max_seq_len=4096, truncate=False)


def read(fields: Fields) -> Features:
    """Read Llama's fields, windows, experts and the experts' activation."""
    fields.only("hidden_act", "silu")
    fields.only("mlp_bias", False)
    # Duplicates: the file has these values under other names too.
    fields.unused_options("experts_per_token", "initial_context_length", "num_experts")
    features = llama.read(fields)
    experts = Experts(
        count=fields.whole("num_local_experts"),
        num_active=fields.whole("num_experts_per_tok"),
        mlp=fields.whole("intermediate_size"),
        has_bias=True,
    )
    if fields.value("rope_parameters", None) is None and fields.value("rope_scaling", None) is None:
        (frequencies,) = features["positions"].frequencies
        features["positions"] = rotary(frequencies.theta, _YARN)
    return features | {
        "attention": AttentionConfig(windows=fields.windows(features["num_layers"], every=2), has_sinks=True),
        "activation": ClampedSwiglu(
            alpha=fields.positive("swiglu_alpha", 1.702), limit=fields.positive("swiglu_limit", 7.0)
        ),
        "experts": experts,
    }


def write(model: ModelConfig) -> dict[str, Any]:
    """Return the config.json of a gpt-oss."""
    assert model.experts is not None
    assert isinstance(model.activation, ClampedSwiglu)
    others = ("attention_bias", "sliding_window", "layer_types")
    return llama.write_shared(model, "gpt_oss", "GptOssForCausalLM", *others) | {
        "intermediate_size": model.experts.mlp,
        "num_local_experts": model.experts.count,
        "num_experts_per_tok": model.experts.num_active,
        "swiglu_alpha": model.activation.alpha,
        "swiglu_limit": model.activation.limit,
    }


_MLP = "model.layers.{layer}.mlp"


def _names() -> dict[str, Published]:
    """Return weight names. A layer's experts share a tensor [experts, in, out]; columns of gate and up alternate."""
    found = names_of(
        {
            **LLAMA_NAMES,
            "layers.router": f"{_MLP}.router.weight",
            "layers.router_bias": f"{_MLP}.router.bias",
            "layers.sinks": "model.layers.{layer}.self_attn.sinks",
        }
    )
    for kind in ("", "_bias"):
        for index, ours in enumerate(("gate", "up")):
            name = f"{_MLP}.experts.gate_up_proj{kind}"
            found[f"layers.expert_{ours}{kind}"] = Published(name, part=(index, 2), is_interleaved=True)
        found[f"layers.expert_down{kind}"] = Published(f"{_MLP}.experts.down_proj{kind}")
    return found


_FEATURES: dict[str, Any] = {"biases": Biases(qkv=True, output=True), "activation": ClampedSwiglu()}

FAMILY = PublishedFamily(
    family=GPT_OSS,
    readers={"gpt_oss": read},
    names=_names(),
    write=write,
    presets=(
        llama.preset(
            "tiny-gpt-oss",
            llama.TINY,
            GPT_OSS,
            **_FEATURES,
            head_dim=16,
            attention=AttentionConfig(windows=(32, None), has_sinks=True),
            positions=rotary(150_000.0, replace(_YARN, original_max_seq_len=64)),
            experts=Experts(count=8, num_active=4, mlp=192, has_bias=True),
        ),
        # gpt-oss: arXiv:2508.10925, table 1, and the config.json of openai/gpt-oss-20b.
        llama.preset(
            "gpt-oss-20b",
            (24, 2880, 2880, 64, 8, 201_088),
            GPT_OSS,
            **_FEATURES,
            head_dim=64,
            attention=AttentionConfig(windows=(128, None), has_sinks=True),
            positions=rotary(150_000.0, _YARN),
            experts=Experts(count=32, num_active=4, mlp=2880, has_bias=True),
        ),
    ),
)
