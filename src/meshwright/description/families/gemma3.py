"""Gemma 3: query and key norms instead of softcaps, five windowed layers per full one, with different thetas."""

from __future__ import annotations

from typing import Any

from meshwright.description.families import gemma, gemma2
from meshwright.description.families.family import Features, PublishedFamily
from meshwright.description.families.fields import Fields
from meshwright.description.families.rope_fields import (
    longest_sequence,
    read_rope_by_layer,
    read_rotary_dims,
    rope_by_layer,
)
from meshwright.description.step.frequencies import LinearRopeScaling
from meshwright.description.step.model import Family, ModelConfig

GEMMA3 = Family("gemma3")


def read(fields: Fields) -> Features:
    """Read Gemma 3's text model, also with older names of the pattern and of theta in layers with a window."""
    every = fields.whole("sliding_window_pattern", 6)
    fields.unused_options("_sliding_window_pattern")  # transformers writes it and does not read it.
    features = gemma2.read_capped(fields, every=every, has_rope=False)
    full, local = read_rope_by_layer(fields, theta=1_000_000.0, local_theta=10_000.0)
    read_rotary_dims(fields, full, features["head_dim"])
    return features | {
        "qk_norm": True,
        "rope_theta": full.theta,
        "rope_scaling": full.scaling,
        "rope_theta_local": local if features["sliding_window"] else None,
    }


def write(model: ModelConfig) -> dict[str, Any]:
    """Return the config.json of a Gemma 3 text model."""
    fields = gemma2.write_capped(model, "gemma3_text", "Gemma3ForCausalLM")
    del fields["rope_theta"]
    return fields | rope_by_layer(model) | longest_sequence(model)


FAMILY = PublishedFamily(
    family=GEMMA3,
    readers={"gemma3_text": read},
    names=gemma2.NAMES,
    write=write,
    presets=(
        gemma.preset(
            "tiny-gemma3",
            (6, 128, 384, 8, 8, 256),
            GEMMA3,
            head_dim=16,
            post_norms=True,
            qk_norm=True,
            sliding_window=32,
            full_attention_every=6,
            rope_theta=1_000_000.0,
            rope_theta_local=10_000.0,
            rope_scaling=LinearRopeScaling(factor=8.0),
        ),
        # Gemma 3: arXiv:2503.19786, table 1, and the config.json of google/gemma-3-1b-pt.
        gemma.preset(
            "gemma3-1b",
            (26, 1152, 6912, 4, 1, 262_144),
            GEMMA3,
            post_norms=True,
            qk_norm=True,
            sliding_window=512,
            full_attention_every=6,
            rope_theta=1_000_000.0,
            rope_theta_local=10_000.0,
        ),
    ),
)
