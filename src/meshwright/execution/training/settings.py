"""Read and replace the settings of a run's config, by the names of their options (`options.training`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import reduce
from typing import Any

from meshwright.execution.training.run_directory.run import RunConfig
from meshwright.execution.training.run_directory.saving import read_save_every
from meshwright.execution.training.watching import EvaluationConfig
from meshwright.options.training import SETTINGS


def get_setting(config: RunConfig, name: str) -> Any:
    """Return the value of a setting in a config."""
    return reduce(getattr, SETTINGS[name].path.split("."), config)


def with_settings(config: RunConfig, values: Mapping[str, Any]) -> RunConfig:
    """Return a config with some settings replaced. values: {option name: new value}.

    Raises:
        MeshwrightError: a value is not valid for its field.
    """
    parts: dict[str, dict[str, Any]] = {}
    for name, value in values.items():
        if name == "fields":
            value = _templates(value)
        elif name in _LISTS:
            value = as_texts(value)
        part, _, field = SETTINGS[name].path.rpartition(".")
        of = parts.setdefault(part, {})
        if name == "save_every":
            of |= read_save_every(value)
        else:
            of[field] = value
    if parts.get("evaluating", {}).get("every") == 0:
        # Evaluation is turned off: drop its other settings too.
        config = replace(config, evaluating=EvaluationConfig())
    own = parts.pop("", {})
    # Replace all fields of a section at once: some are only valid together.
    config = replace(config, **own, **{part: replace(getattr(config, part), **of) for part, of in parts.items()})
    if config.data.rows is not None:  # The workload must agree.
        config = replace(config, workload=replace(config.workload, packed=config.data.rows != "windows"))
    return config


_LISTS = ("data", "no_decay", "rate", "eval_data", "eval_tasks")
"""Settings with several texts. A user can give one text, a list or a tuple."""


def as_texts(value: Any) -> Any:
    """Return a text or a list of texts as a tuple; any other value as it is."""
    return (value,) if isinstance(value, str) else tuple(value) if isinstance(value, list) else value


def _templates(value: Any) -> Any:
    """Return record templates for `DataConfig.fields`, from one text, a list, or a mapping {path: template}."""
    if isinstance(value, Mapping):
        return tuple(f"{path}={template}" for path, template in value.items())
    return (value,) if isinstance(value, str) else tuple(value) if isinstance(value, list) else value
