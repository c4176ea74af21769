"""`resolved.yaml` of a run directory: what `--config` takes to begin the same run again."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from meshwright.files import write_file
from meshwright.mesh import MeshShape
from meshwright.planner.options import STRATEGY_OPTIONS
from meshwright.step import DEFAULT
from meshwright.training.run import RunConfig
from meshwright.training.settings import SETTINGS, get_setting

FILE = "resolved.yaml"

_SAID = ("learning_rate", "warmup_steps", "seed")
"""Settings that are written in any case: their defaults depend on others, or decide what is drawn."""

_HEAD = "# What began this run, for `meshwright train --config`; what is not here has its default.\n"


def resolved_yaml(config: RunConfig) -> str | None:
    """The text of the file; None for a run of a model that was given as an object, which no option names."""
    if config.source is None:
        return None
    said = {name: value for name, value in _options(config) if value is not None}
    return _HEAD + yaml.safe_dump(said, sort_keys=False, allow_unicode=True)


def _options(config: RunConfig) -> Iterator[tuple[str, Any]]:
    """The options of a run by name: its workload, its strategy, and the settings that are not their defaults."""
    workload, strategy = config.workload, config.strategy
    yield from {"model": config.source, "on": config.hardware, "mesh": str(config.mesh)}.items()
    yield from {"batch": workload.batch, "seq_len": workload.seq_len, "num_layers": workload.config.num_layers}.items()
    yield from {"dtype": workload.compute_dtype, "param_dtype": workload.param_dtype, "remat": workload.remat}.items()
    yield from {"hardware": config.hardware_file, "memory_headroom": config.memory_headroom}.items()
    if workload.objective != "next-token":
        yield from {"objective": workload.objective, "reference": workload.reference}.items()
    for name in STRATEGY_OPTIONS:
        value = getattr(strategy, name)
        value = str(value) if isinstance(value, MeshShape) else value
        # What is chosen for a chip is said, and what would change nothing is not.
        if value != getattr(DEFAULT, name) or name in ("attention", "num_microbatches", "zero_stage"):
            yield name, value
    yield "steps", config.steps
    if config.tokenizer is not None and config.weights is None:
        yield "from_scratch", True
    default = RunConfig(
        workload=workload, mesh=config.mesh, hardware=config.hardware, optimizer=type(config.optimizer)(), steps=1
    )
    for name in SETTINGS:
        value = get_setting(config, name)
        is_end = name == "decay_steps" and value == config.steps
        if name in _SAID or (value != get_setting(default, name) and not is_end):
            yield name, list(value) if isinstance(value, tuple) else value


def write_resolved(directory: Path, config: RunConfig) -> None:
    """Write the file into a run directory."""
    if (text := resolved_yaml(config)) is not None:
        write_file(directory / FILE, text)
