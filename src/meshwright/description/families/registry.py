"""All families: presets by name, and models read from data."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from meshwright.description.families import (
    deepseek,
    gemma,
    gemma2,
    gemma3,
    gpt2,
    gpt_neox,
    gpt_oss,
    llama,
    llama4,
    mixtral,
    olmo2,
    phi3,
    qwen2,
    qwen3,
    qwen3_next,
)
from meshwright.description.families.comparison import differences
from meshwright.description.families.family import PublishedFamily
from meshwright.description.families.fields import Config, Fields
from meshwright.description.families.former import with_present_fields
from meshwright.description.families.quantization import check_quantization
from meshwright.description.families.variants import (
    cohere2,
    dots1,
    ernie4_5,
    exaone4,
    gemma3n,
    gemma4,
    glm4,
    glm4_moe,
    granite,
    hunyuan,
    minimax_m2,
    mistral4,
    nemotron,
    olmoe,
    phi,
    phimoe,
    qwen3_5,
    seed_oss,
    smollm3,
    starcoder2,
)
from meshwright.description.families.wrappers import text_config
from meshwright.description.step.model import Family, Model, ModelConfig
from meshwright.description.step.serving import Serving
from meshwright.description.step.workload import Workload
from meshwright.errors import MeshwrightError
from meshwright.support.field_types import from_data, not_a_choice

PUBLISHED: tuple[PublishedFamily, ...] = tuple(
    module.FAMILY
    for module in (
        *(llama, mixtral, qwen2, qwen3, qwen3_next, gemma, gemma2, gemma3, phi3, olmo2),
        *(gpt2, gpt_neox, gpt_oss, deepseek, llama4),
        *(smollm3, granite, seed_oss, ernie4_5, glm4, hunyuan, exaone4, starcoder2, cohere2, nemotron),
        *(olmoe, glm4_moe, dots1, phi, minimax_m2, qwen3_5, mistral4, gemma4, gemma3n, phimoe),
    )
)

FAMILIES: Mapping[str, Family] = {published.family.name: published.family for published in PUBLISHED}

PRESETS: Mapping[str, ModelConfig] = {model.name: model for published in PUBLISHED for model in published.presets}
"""The models known by name, each from its paper or the config.json on Hugging Face."""

_BY_TYPE = {kind: published for published in PUBLISHED for kind in published.readers}


def model_from_data(data: Any, path: str = "") -> ModelConfig:
    """Return the model that `dataclasses.asdict` of this or an earlier version turned into `data`.

    path: the place of `data` in its file, for error messages.
    """
    return from_data(ModelConfig, with_present_fields(data, path), path, {Family: _family_from_data})


def workload_from_data(data: Any, path: str = "") -> Workload:
    """Return the workload that `dataclasses.asdict` turned into `data`. path: as in `model_from_data`."""
    return from_data(Workload, data, path, {Model: model_from_data})


def serving_from_data(data: Any, path: str = "") -> Serving:
    """Return the `Serving` that `dataclasses.asdict` turned into `data`. path: as in `model_from_data`."""
    return from_data(Serving, data, path, {ModelConfig: model_from_data})


def _family_from_data(data: Any, path: str) -> Family:
    family = from_data(Family, data, path)
    # Some presets, such as PaLM, have a family with generic layers and no Hugging Face format.
    known = dict.fromkeys((*FAMILIES, Family().name, *(model.family.name for model in PRESETS.values())))
    if family.name not in known:
        raise MeshwrightError(not_a_choice(f"{path}.name", family.name, known))
    return FAMILIES.get(family.name, family)


def model_from_hugging_face(data: Config, *, name: str) -> ModelConfig:
    """Return the model that a Hugging Face `config.json` describes.

    Raises for an unknown family or field, which the message names: see `families.fields`.
    """
    if "model_type" not in data:
        what = {
            "meshwright_plan": ": it is a plan, for verify and train",
            "workload": ": it is that of a run, which `meshwright train … --resume` goes on with",
        }
        hint = next((words for field, words in what.items() if field in data), "")
        raise MeshwrightError(
            f"the config.json of {name} has no model_type{hint}; those read are {', '.join(_BY_TYPE)}"
        )
    data = text_config(data, name=name)
    kind = str(data["model_type"])
    if kind not in _BY_TYPE:
        names = {each.removesuffix("_text"): each for each in _BY_TYPE}
        close = difflib.get_close_matches(kind.removesuffix("_text"), names, n=1)
        nearest = "".join(f"the nearest name is {names[each]!r}; " for each in close)
        raise MeshwrightError(
            f"the config.json of {name} has model_type {kind!r}; {nearest}those read are {', '.join(_BY_TYPE)}"
        )
    published, config = _BY_TYPE[kind], Fields(data, name=name, family=kind)
    features: dict[str, Any] = published.readers[kind](config)
    check_quantization(config)
    config.check_all_known()
    return ModelConfig(name=name, family=published.family, **features)


def published_of(model: ModelConfig) -> PublishedFamily | None:
    """Return a model's family with its config.json and weight names; None if it has none on Hugging Face."""
    return next((known for known in PUBLISHED if known.family == model.family), None)


def hugging_face_config(model: ModelConfig) -> dict[str, Any]:
    """Return the config.json of a model; `model_from_hugging_face` reads the same model from it.

    Raises:
        MeshwrightError: no Hugging Face family can express all features of the model.
    """
    published = published_of(model)
    written = published.write(model) if published and published.write else {}
    read = model_from_hugging_face(written, name=model.name) if written else None
    if read is not None and model.experts and all(map(model.experts.are_in, range(model.num_layers))):
        model = replace(model, mlp=read.mlp)  # Its width is not in the file, because no layer has a dense MLP.
    if read != model:
        wrong = {} if read is None else differences(model, read)
        which = next((f": {name}={value} has no field there" for name, (value, _) in wrong.items()), "")
        raise MeshwrightError(f"no config.json of Hugging Face describes {model.name}{which}")
    return written
