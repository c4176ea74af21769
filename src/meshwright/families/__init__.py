"""One file a model family: its config.json, the names of its weights, its presets. A new family is a file and a line.

What its layers are follows from the features of its models (`step.blocks`), or from a `Family` of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meshwright.errors import MeshwrightError
from meshwright.families import deepseek, gemma, gemma2, gemma3, gpt2, gpt_neox, llama, mixtral, qwen2, qwen3
from meshwright.families.family import PublishedFamily
from meshwright.families.fields import Config, Fields
from meshwright.step.model import Family, ModelConfig

PUBLISHED: tuple[PublishedFamily, ...] = tuple(
    module.FAMILY for module in (llama, mixtral, qwen2, qwen3, gemma, gemma2, gemma3, gpt2, gpt_neox, deepseek)
)

FAMILIES: Mapping[str, Family] = {published.family.name: published.family for published in PUBLISHED}

PRESETS: Mapping[str, ModelConfig] = {model.name: model for published in PUBLISHED for model in published.presets}
"""The models known by name, each from its paper or the config.json published with its weights."""

_BY_TYPE = {kind: published for published in PUBLISHED for kind in published.readers}


def model_from_hugging_face(data: Config, *, name: str) -> ModelConfig:
    """The model that a Hugging Face `config.json` describes.

    A family that is not known, and a field that is not, are refused by name: see `families.fields`.
    """
    kind = str(data.get("model_type"))
    if kind not in _BY_TYPE:
        raise MeshwrightError(
            f"the config.json of {name} has model_type {kind!r}; those read are {', '.join(_BY_TYPE)}"
        )
    published, fields = _BY_TYPE[kind], Fields(data, name=name, family=kind)
    features: dict[str, Any] = published.readers[kind](fields)
    fields.check_all_known()
    return ModelConfig(name=name, family=published.family, **features)


__all__ = ["FAMILIES", "PRESETS", "PUBLISHED", "model_from_hugging_face"]
