"""Phi-3: Llama whose checkpoints fuse queries, keys and values into one tensor, and gate and up into another."""

from __future__ import annotations

from typing import Any

from meshwright.description.families import llama
from meshwright.description.families.family import (
    GATE_UP_PROJ,
    LLAMA_NAMES,
    QKV_PROJ,
    Features,
    PublishedFamily,
    fused,
    names_of,
)
from meshwright.description.families.fields import Fields
from meshwright.description.families.rope_fields import check_longrope, frequencies_of
from meshwright.description.step.frequencies import LongRopeScaling
from meshwright.description.step.model import AttentionConfig, Family, ModelConfig

PHI3 = Family("phi3")


def read(fields: Fields) -> Features:
    """Read Llama's fields. Dropout is ignored; longrope's original length is a field beside `rope_scaling`."""
    fields.unused_options("resid_pdrop", "embd_pdrop", "original_max_position_embeddings")
    features = llama.read(fields, partial_field="partial_rotary_factor")
    (frequencies,) = features["positions"].frequencies
    check_longrope(fields, frequencies)
    if frequencies.scaling and features["head_dim"] * features["num_heads"] != features["embed"]:
        raise fields.refusal("head_dim", "with longrope heads share hidden_size evenly among num_attention_heads")
    return features


def write(model: ModelConfig) -> dict[str, Any]:
    """Return the config.json of a Phi-3."""
    others = ("sliding_window", "partial_rotary_factor", "pad_token_id")
    fields = llama.write_shared(model, "phi3", "Phi3ForCausalLM", *others)
    if isinstance(scaling := frequencies_of(model).scaling, LongRopeScaling):
        fields["original_max_position_embeddings"] = scaling.original_max_seq_len
    return fields


FAMILY = PublishedFamily(
    family=PHI3,
    readers={"phi3": read},
    names=fused(names_of(LLAMA_NAMES), QKV_PROJ, GATE_UP_PROJ),
    write=write,
    presets=(
        # Phi-3: arXiv:2404.14219, section 2, and the config.json of microsoft/Phi-3-mini-4k-instruct.
        llama.preset(
            "phi3-mini",
            (32, 3072, 8192, 32, 32, 32_064),
            PHI3,
            head_dim=96,
            attention=AttentionConfig(windows=(2047,)),
        ),
    ),
)
