"""Gemma 3: query and key norms instead of softcaps, five windowed layers per full one, with different thetas."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from meshwright.description.families import gemma, gemma2
from meshwright.description.families.family import Features, PublishedFamily
from meshwright.description.families.fields import Fields
from meshwright.description.families.rope_fields import longest_sequence, read_rotary_by_window, rope_by_layer
from meshwright.description.step.frequencies import Frequencies, LinearRopeScaling
from meshwright.description.step.model import AttentionConfig, Family, ModelConfig, RotaryPositions

GEMMA3 = Family("gemma3")

_LOCAL, _GLOBAL = Frequencies(theta=10_000.0), Frequencies(theta=1_000_000.0)


def read(fields: Fields) -> Features:
    """Read Gemma 3's text model. Older names of the fields for windowed layers and their theta are read too."""
    every = fields.whole("sliding_window_pattern", 6)
    fields.unused_options("_sliding_window_pattern")  # transformers writes it and does not read it.
    features = gemma2.read_capped(fields, every=every, has_rope=False)
    return features | {
        "attention": replace(features["attention"], qk_norm="head"),
        "positions": read_rotary_by_window(fields, features, theta=_GLOBAL.theta, local_theta=_LOCAL.theta),
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
            norms=gemma2.NORMS,
            attention=AttentionConfig(windows=(32,) * 5 + (None,), qk_norm="head"),
            positions=RotaryPositions(
                frequencies=(_LOCAL,) * 5 + (replace(_GLOBAL, scaling=LinearRopeScaling(factor=8.0)),)
            ),
        ),
        # Gemma 3: arXiv:2503.19786, table 1, and the config.json of google/gemma-3-1b-pt.
        gemma.preset(
            "gemma3-1b",
            (26, 1152, 6912, 4, 1, 262_144),
            GEMMA3,
            norms=gemma2.NORMS,
            attention=AttentionConfig(windows=(512,) * 5 + (None,), qk_norm="head"),
            positions=RotaryPositions(frequencies=(_LOCAL,) * 5 + (_GLOBAL,)),
        ),
    ),
)
