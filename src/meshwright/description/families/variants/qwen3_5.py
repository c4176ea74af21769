"""Qwen3.5 and 3.6: Qwen3-Next with a tensor for each projection of linear attention, and dense MLPs or experts.

Their released models read images too; the text model is read here.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from meshwright.description.families import llama
from meshwright.description.families.family import Features, PublishedFamily
from meshwright.description.families.fields import Fields
from meshwright.description.families.qwen2 import read_experts, write_experts
from meshwright.description.families.qwen3_next import NORMS, names_with, read_dense, with_shared, write_dense
from meshwright.description.step.attention import LinearAttention
from meshwright.description.step.model import AttentionConfig, Experts, Family, ModelConfig, rotary

QWEN3_5 = Family("qwen3_5")


def read(fields: Fields, *, mlp_field: str = "intermediate_size") -> Features:
    """Read a model with dense MLPs. mlp_field: as in `llama.read`."""
    # transformers does not read these fields of the released files. The second token's module is left out.
    fields.only("attn_output_gate", True)
    fields.only("output_gate_type", "silu", "swish")
    fields.unused_options("mamba_ssm_dtype", "mtp_num_hidden_layers", "mtp_use_dedicated_embeddings")
    return read_dense(fields, mlp_field=mlp_field)


def read_moe(fields: Fields) -> Features:
    """Read a model with experts in every layer, whose weights for a token are normalised to sum to 1."""
    features = read(fields, mlp_field="moe_intermediate_size")
    fields.only("norm_topk_prob", True)
    fields.only("mlp_only_layers", [])
    fields.only("decoder_sparse_step", 1)
    fields.unused_options("intermediate_size")
    experts = with_shared(fields, read_experts(fields, features)["experts"])
    return features | {"experts": replace(experts, routing=replace(experts.routing, is_normed=True))}


def write(model: ModelConfig) -> dict[str, Any]:
    """Return the config.json of the text model."""
    if (experts := model.experts) is None:
        return write_dense(model, "qwen3_5_text", "Qwen3_5ForCausalLM")
    fields = write_dense(model, "qwen3_5_moe_text", "Qwen3_5MoeForCausalLM") | write_experts(model, experts)
    fields = {name: value for name, value in fields.items() if name != "intermediate_size"}
    return fields | {"shared_expert_intermediate_size": experts.shared_mlp}


def _attention(num_value_heads: int, num_heads: int = 16, dims: int = 128) -> AttentionConfig:
    """Return attention with a gated output, in every fourth layer. dims: of each key and value of the other layers."""
    linear = LinearAttention(num_heads=num_heads, num_value_heads=num_value_heads, key_dim=dims, value_dim=dims)
    return AttentionConfig(qk_norm="head", has_output_gate=True, linear=linear)


_FEATURES: dict[str, Any] = {
    "family": QWEN3_5,
    "head_dim": 256,
    "norms": NORMS,
    "positions": replace(rotary(10_000_000.0), dims=64),
}

FAMILY = PublishedFamily(
    family=QWEN3_5,
    readers={"qwen3_5_text": read, "qwen3_5_moe_text": read_moe},
    names=names_with(
        ("in_proj_qkv", ("linear_query", "linear_key", "linear_value")),
        ("in_proj_z", ("linear_gate",)),
        ("in_proj_b", ("linear_rate",)),
        ("in_proj_a", ("linear_decay",)),
        by_head=0,
    ),
    write=write,
    buffers=(r"^mtp\.",),  # The multi-token prediction module.
    presets=(
        llama.preset(
            "tiny-qwen3.5",
            (4, 128, 384, 8, 8, 256),
            **_FEATURES | {"head_dim": 16, "positions": replace(rotary(10_000.0), dims=4)},
            attention=_attention(16, num_heads=8, dims=16),
        ),
        # The config.json of Qwen/Qwen3.5-27B and of Qwen/Qwen3.5-35B-A3B.
        llama.preset("qwen3.5-27b", (64, 5120, 17408, 24, 4, 248_320), **_FEATURES, attention=_attention(48)),
        llama.preset(
            "qwen3.5-35b-a3b",
            (40, 2048, 512, 16, 2, 248_320),
            **_FEATURES,
            attention=_attention(32),
            experts=Experts(count=256, num_active=8, mlp=512, shared_mlp=512, has_shared_gate=True),
        ),
    ),
)
