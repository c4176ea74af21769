"""Load a model by a preset's name or the path of a config.json; look up its training sequence length."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from meshwright.description.families.quantization import PublishedWeights, published_weights
from meshwright.description.families.registry import PRESETS, model_from_hugging_face
from meshwright.description.families.wrappers import text_config
from meshwright.description.step.model import LearnedPositions, ModelConfig
from meshwright.errors import MeshwrightError, did_you_mean, near_names

RESNETS = ("resnet18", "resnet34", "resnet50", "resnet101", "resnet152")
"""The names of the programs in `examples.resnet`, which are planned as any JAX function is."""

SEQ_LENS: Mapping[str, int] = {
    "llama2-7b": 4096,
    "llama2-13b": 4096,
    "llama2-70b": 4096,
    "llama3-8b": 8192,
    "llama3-70b": 8192,
    "llama3-405b": 8192,
    "palm-540b": 2048,
    "bloom-176b": 2048,
    "mixtral-8x7b": 8192,
    "deepseek-v3": 4096,
    "qwen3-8b": 4096,
    "gemma-7b": 8192,
    "gemma2-9b": 8192,
}
"""Tokens of a sequence in pre-training, by preset, from its paper; Mixtral's is Mistral 7B's (arXiv:2310.06825)."""


def usual_seq_len(model: ModelConfig) -> int:
    """Return the default sequence length of a plan.

    It is the first known of: the preset's length in pre-training, the number of learned positions, 2048.
    """
    positions = model.positions
    return SEQ_LENS.get(model.name) or (positions.rows if isinstance(positions, LearnedPositions) else 2048)


def trained_seq_len(name: str) -> int:
    """Return the pre-training sequence length of a preset or of a `config.json`, in tokens; 0 if unknown."""
    path = _config_path(name)
    if path is None:
        return SEQ_LENS.get(name.lower(), 0)
    found = text_config(_read_json(path), name=_model_name(path)).get("max_position_embeddings")
    return found if isinstance(found, int) else 0


def load_model(name: str) -> ModelConfig:
    """Return the model for a preset's name, in any case, or for a path to a `config.json` (or its folder)."""
    if not Path(name).exists() and name.lower() in (*PRESETS, *RESNETS):
        name = name.lower()
    if name in PRESETS:
        return PRESETS[name]
    if name in RESNETS:
        raise MeshwrightError(
            f"{name} is a program of images: `meshwright plan {name} …` plans it, and in Python"
            f" mw.plan(step, *arguments, on=…) with step, arguments = meshwright.examples.resnet.make({name!r}, batch)"
        )
    if (path := _config_path(name)) is not None:
        return model_from_hugging_face(_read_json(path), name=_model_name(path))
    hint = did_you_mean(near_names(name.lower(), (*PRESETS, *RESNETS)))
    raise MeshwrightError(
        f"no model {name!r}; {hint}`meshwright help models` lists them, or give the path of a config.json"
    )


def load_published_weights(name: str) -> PublishedWeights | None:
    """Return how the weights of a path to a `config.json` (or its folder) are quantised; None for a preset."""
    path = None if name in PRESETS else _config_path(name)
    return None if path is None else published_weights(_read_json(path))


def _config_path(name: str) -> Path | None:
    """Return the path of a `config.json`; None if there is no such file. name: the path of the file or its folder."""
    path = Path(name) / "config.json" if Path(name).is_dir() else Path(name)
    return path if path.is_file() else None


def _model_name(path: Path) -> str:
    """Return a model name for a file: its folder's name for `config.json`, else the file's name without suffix."""
    return path.parent.name if path.name == "config.json" and path.parent.name else path.stem


class _TwiceError(Exception):
    """A JSON object has a field twice."""


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object from its (name, value) pairs. Raises if a name occurs twice."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise _TwiceError(next(name for name in names if names.count(name) > 1))
    return found


def _read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file."""
    if path.suffix.lower() in (".yaml", ".yml"):
        raise MeshwrightError(
            f"{path} is YAML, and no config.json; a plan's file goes into plan, show, verify and train"
        )
    try:
        data = json.loads(path.read_text(), object_pairs_hook=_object)
    except OSError as error:
        raise MeshwrightError(f"cannot read {path}: {error.strerror}") from None
    except _TwiceError as error:
        raise MeshwrightError(f"{path} has the field {error} twice; leave one out") from None
    except RecursionError:
        raise MeshwrightError(f"{path} is not a config.json: its values are nested too deeply") from None
    except ValueError as error:
        raise MeshwrightError(f"{path} is not JSON: {error}") from None
    if not isinstance(data, dict):
        raise MeshwrightError(f"{path} holds a {type(data).__name__}; a config.json holds an object")
    return data
