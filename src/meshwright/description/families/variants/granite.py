"""Granite: Llama with factors of embeddings, scores, residual additions and logits, and with experts or without."""

from __future__ import annotations

from typing import Any

from meshwright.description.families import llama
from meshwright.description.families.family import LLAMA_NAMES, Features, Published, PublishedFamily, names_of
from meshwright.description.families.fields import Fields
from meshwright.description.step.model import Experts, Family, ModelConfig, Scales

GRANITE = Family("granite")


def read(fields: Fields) -> Features:
    """Read Llama's fields and the factors; the file's factor of the logits is a divisor."""
    scales = Scales(
        embedding=fields.positive("embedding_multiplier", 1.0),
        attention=fields.positive("attention_multiplier", 1.0),
        residual=fields.positive("residual_multiplier", 1.0),
        logits=1 / fields.positive("logits_scaling", 1.0),
    )
    return llama.read(fields) | {"scales": scales}


def read_moe(fields: Fields) -> Features:
    """Read a Granite with experts in every layer."""
    experts = Experts(
        count=fields.whole("num_local_experts", 8),
        num_active=fields.whole("num_experts_per_tok", 2),
        mlp=fields.whole("intermediate_size"),
    )
    return read(fields) | {"experts": experts}


def write(model: ModelConfig) -> dict[str, Any]:
    """Return the config.json of a Granite, with experts or without."""
    if experts := model.experts:
        return _write(model, "granitemoe", "GraniteMoeForCausalLM") | {
            "intermediate_size": experts.mlp,
            "num_local_experts": experts.count,
            "num_experts_per_tok": experts.num_active,
        }
    return _write(model, "granite", "GraniteForCausalLM") | {"mlp_bias": model.biases.mlp}


def _write(model: ModelConfig, kind: str, architecture: str) -> dict[str, Any]:
    scales = model.scales
    return llama.write_shared(model, kind, architecture, "attention_bias") | {
        "embedding_multiplier": scales.embedding,
        "attention_multiplier": model.head_dim**-0.5 if scales.attention is None else scales.attention,
        "residual_multiplier": scales.residual,
        # Rounded, because 49 inverted twice is 49.00000000000001.
        "logits_scaling": float(f"{1 / scales.logits:.12g}"),
    }


_MOE = "model.layers.{layer}.block_sparse_moe"

FAMILY = PublishedFamily(
    family=GRANITE,
    readers={"granite": read, "granitemoe": read_moe},
    names=names_of({**LLAMA_NAMES, "layers.router": f"{_MOE}.router.layer.weight"})
    # A tensor holds all experts of a layer, [experts, out, in]; gate and up share one.
    | {
        "layers.expert_gate": Published(f"{_MOE}.input_linear.weight", is_transposed=True, part=(0, 2)),
        "layers.expert_up": Published(f"{_MOE}.input_linear.weight", is_transposed=True, part=(1, 2)),
        "layers.expert_down": Published(f"{_MOE}.output_linear.weight", is_transposed=True),
    },
    write=write,
)
