"""Multimodal models (text and images): the config and weight names of their text model."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from meshwright.description.families.fields import Config
from meshwright.errors import MeshwrightError

TEXT_DEFAULTS: Mapping[str, Config] = {
    "gemma3": {
        "model_type": "gemma3_text",
        "num_attention_heads": 8,
        "vocab_size": 262_208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
    },
    "gemma3n": {
        "model_type": "gemma3n_text",
        "num_attention_heads": 8,
        "vocab_size": 262_400,
        "hidden_size": 2048,
        "intermediate_size": 16_384,
        "num_hidden_layers": 35,
    },
    "gemma4": {
        "model_type": "gemma4_text",
        "num_attention_heads": 8,
        "vocab_size": 262_144,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 30,
    },
    "gemma4_unified": {"model_type": "gemma4_unified_text"},
    "llama4": {"model_type": "llama4_text"},
    "mistral3": {"model_type": "mistral", "sliding_window": None},
    "qwen3_5": {"model_type": "qwen3_5_text"},
    "qwen3_5_moe": {"model_type": "qwen3_5_moe_text"},
}
"""By the whole model's model_type: transformers' defaults for missing fields of its text model."""

OUTER = ("quantization_config", "tie_word_embeddings", "dtype", "torch_dtype", "eos_token_id", "bos_token_id")
"""Top-level fields that apply to the text model unless `text_config` has them too."""

_TEXT = re.compile(r"^(?:language_model\.|model\.language_model\.)")
_OTHER = re.compile(
    r"^(?:model\.)?(vision_tower|vision_model|vision_embedder|embed_vision|visual|audio_tower|embed_audio"
    r"|multi_modal_projector|image_newline)\b"
)


def text_config(data: Config, *, name: str) -> Config:
    """Return the config of the text model if `data` is a multimodal model's config; else `data` itself.

    Raises:
        MeshwrightError: `text_config` is not an object.
    """
    kind = str(data.get("model_type"))
    if "text_config" not in data or kind not in TEXT_DEFAULTS:
        return data
    own = data["text_config"]
    if not isinstance(own, Mapping):
        raise MeshwrightError(f"the config.json of {name} has text_config={own!r}; it takes an object")
    outer = {field: data[field] for field in OUTER if data.get(field) is not None}
    return {**TEXT_DEFAULTS[kind], **outer, **own}


class TextNames(NamedTuple):
    """Tensor names of the text model in a multimodal checkpoint.

    names: each tensor's name in the file, by its name in a text-only model. left_out: the file's other parts, such as
    `vision_tower`.
    """

    names: dict[str, str]
    left_out: tuple[str, ...]


def text_names(names: Iterable[str]) -> TextNames:
    """Separate the text model's tensors of a checkpoint from its other parts. names: all tensor names of the file.

    If no name begins with `language_model.` or `model.language_model.`, all names are returned unchanged.
    """
    names = list(names)
    if not any(map(_TEXT.match, names)):
        return TextNames({name: name for name in names}, ())
    others = {name: match[1] for name in names if (match := _OTHER.match(name))}
    return TextNames(
        {_text_name(name): name for name in names if name not in others}, tuple(dict.fromkeys(others.values()))
    )


def _text_name(name: str) -> str:
    """Return a tensor's name in a text-only model: `model.x` or `lm_head.x`, without `language_model`."""
    whole = "model.language_model."
    return f"model.{name.removeprefix(whole)}" if name.startswith(whole) else name.removeprefix("language_model.")
