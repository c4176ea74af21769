"""`resolved.yaml` of a run directory: options for `--config` that start the same run again."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from meshwright.description.step.strategy import DEFAULT
from meshwright.execution.training.run_directory.resume import option_value
from meshwright.execution.training.run_directory.run import RunConfig
from meshwright.execution.training.settings import get_setting
from meshwright.mesh import MeshShape
from meshwright.options.training import SETTINGS
from meshwright.planning.library import plan_to_run
from meshwright.planning.options import STRATEGY_OPTIONS, WORKLOAD_OPTIONS
from meshwright.planning.plan import is_plan_file
from meshwright.support.files import write_file

FILE = "resolved.yaml"

_SAID = ("learning_rate", "warmup_steps", "seed")
"""Settings that are always written: their defaults depend on other settings, or they affect random numbers."""

_HEAD = "# What began this run, for `meshwright train --config`; what is not here has its default.\n"


def resolved_yaml(config: RunConfig) -> str | None:
    """Return the text of a run's `resolved.yaml`.

    None if no options describe the run: its model was given as an object, or its plan file has changed since.
    """
    if config.source is None:
        return None
    if is_plan_file(config.source):
        plan = plan_to_run(config.source, {})
        now = (replace(config.workload, param_dtype=plan.workload.param_dtype), config.mesh, config.hardware)
        if now != (plan.workload, plan.mesh, plan.hardware):
            return None
        options = {"param_dtype": config.workload.param_dtype}
    else:
        options = {name: option_value(name, config) for name in WORKLOAD_OPTIONS if name not in _OTHERWISE}
        options = {"on": config.hardware, "mesh": str(config.mesh)} | options
        options |= {"hardware": config.hardware_file, "memory_headroom": config.memory_headroom}
    said = {"model": config.source, **options, **dict(_of_run(config))}
    plain = {name: _plain(value) for name, value in said.items() if value is not None and value != ()}
    return _HEAD + yaml.safe_dump(plain, sort_keys=False, allow_unicode=True)


_OTHERWISE = ("on", "batch_tokens", "hardware", "memory_headroom")
"""Workload options that `resolved_yaml` writes in another place, or that another option replaces."""


def _of_run(config: RunConfig) -> Iterator[tuple[str, Any]]:
    """Yield (name, value) of the strategy options and settings of a run that differ from their defaults."""
    for name in STRATEGY_OPTIONS:
        value = getattr(config.strategy, name)
        # These defaults are chosen for a chip or a batch, so they are always written.
        if value != getattr(DEFAULT, name) or name in ("attention", "num_microbatches"):
            yield name, value
    yield "steps", config.steps
    if config.tokenizer is not None and config.weights is None:
        yield "from_scratch", True
    default = RunConfig(
        workload=config.workload,
        mesh=config.mesh,
        hardware=config.hardware,
        optimizer=type(config.optimizer)(),
        steps=config.steps,
    )
    for name in SETTINGS:
        value = get_setting(config, name)
        is_end = name == "decay_steps" and value == config.steps
        if name in _SAID or (value != get_setting(default, name) and not is_end):
            yield name, value


def _plain(value: Any) -> Any:
    """Return a value in the form in which a user writes it in YAML."""
    if isinstance(value, tuple):
        return list(value)
    return str(value) if isinstance(value, MeshShape) else value


def write_resolved(directory: Path, config: RunConfig) -> None:
    """Write `resolved.yaml` into a run directory, if options describe the run."""
    if (text := resolved_yaml(config)) is not None:
        write_file(directory / FILE, text)
