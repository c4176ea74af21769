"""Hunyuan without experts: Llama with a norm of each query and key head after the rotary embedding."""

from __future__ import annotations

from typing import Any

from meshwright.description.families import llama
from meshwright.description.families.family import LLAMA_NAMES, Features, PublishedFamily, names_of
from meshwright.description.families.fields import Fields
from meshwright.description.families.rope_fields import scaling_field
from meshwright.description.step.model import AttentionConfig, Family, ModelConfig, rotary

HUNYUAN = Family("hunyuan_v1_dense")


def read(fields: Fields) -> Features:
    """Read Llama's fields, and norms of queries and keys."""
    fields.unused_options("eod_token_id")
    fields.whole("head_dim")  # Required: transformers does not derive it.
    return _read(fields) | {"attention": AttentionConfig(qk_norm="rotated head")}


def _read(fields: Fields) -> Features:
    """Read Llama's fields. Rope scaling of type `dynamic` with an `alpha` changes theta, at every sequence length."""
    rope = fields.mapping(name := scaling_field(fields))
    if "dynamic" not in (rope.get("rope_type"), rope.get("type")) or not rope.get("alpha"):
        return llama.read(fields)
    features, alpha = llama.read(fields, has_rope=False), fields.above_zero(f"{name}.alpha", rope["alpha"])
    theta, dims = rope.get("rope_theta", fields.value("rope_theta", 10_000.0)), features["head_dim"]
    if dims == 2:
        raise fields.refusal(name, "with alpha a head has more than 2 dims")
    return features | {"positions": rotary(fields.above_zero("rope_theta", theta) * alpha ** (dims / (dims - 2)))}


def write(model: ModelConfig) -> dict[str, Any]:
    """Return the config.json of a Hunyuan."""
    return llama.write_shared(model, "hunyuan_v1_dense", "HunYuanDenseV1ForCausalLM", "attention_bias")


FAMILY = PublishedFamily(
    family=HUNYUAN,
    readers={"hunyuan_v1_dense": read},
    names=names_of(
        {
            **LLAMA_NAMES,
            "layers.query_norm": "model.layers.{layer}.self_attn.query_layernorm.weight",
            "layers.key_norm": "model.layers.{layer}.self_attn.key_layernorm.weight",
        }
    ),
    write=write,
)
