"""Read a file of another framework's settings as a plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from meshwright.description.frameworks.framework import framework_fields
from meshwright.errors import MeshwrightError
from meshwright.options.values import SystemLike, read_system
from meshwright.planning.exchange.files import Format, read_values
from meshwright.planning.exchange.plan_fields import OVERLAPS
from meshwright.planning.exchange.reading import read_options
from meshwright.planning.exchange.settings import Meaning
from meshwright.planning.exchange.tables import OptionTable, exchange_names, load_table, named_options
from meshwright.planning.options import read_model
from meshwright.planning.plan import Plan, make_plan
from meshwright.support.files import as_path


@dataclass(frozen=True, kw_only=True)
class Imported:
    """The plan that a settings file describes, and the meaning of each option."""

    framework: str  # The framework of the settings, such as `maxtext`.
    title: str  # The framework's name in texts, such as `MaxText`.
    path: Path
    meanings: tuple[Meaning, ...]
    nothing: Mapping[str, list[str]]  # The file's options that do not affect a step, by the reason.
    plan: Plan


def import_settings(
    path: str | Path,
    on: SystemLike,
    *,
    model: str | Path | None = None,
    framework: str | None = None,
    hardware: str | Path | None = None,
    memory_headroom: float | str | None = None,
) -> Imported:
    """Return the plan that a MaxText, Levanter, torchtitan, Megatron-LM, LWM or EasyLM file describes.

    Args:
        path: YAML of MaxText or Levanter, TOML of torchtitan, or flags of Megatron-LM, LWM or EasyLM, as a list or in a
            shell script. The format is detected from the contents.
        on: the hardware, such as `v5p:4x4x4`; it determines degrees that the file leaves open.
        model: a preset's name or the path of a config.json, if the file does not describe the model.
        framework: predict the step as this framework runs it, such as `maxtext` (`description.frameworks`); by default
            as meshwright runs it.
        hardware: the TOML file of a custom chip.
        memory_headroom: see `System`.

    Raises:
        MeshwrightError: an option or a value is unknown; the message names it.
    """
    path = as_path(path)
    kind, values = read_values(path)
    name = find_framework_of(kind, values, path)
    system = read_system(on, hardware, memory_headroom)
    found = None if model is None else read_model(model)
    read = read_options(name, values, system, model=found, model_name=path.stem)
    strategy = read.strategy
    if framework is not None:
        theirs = framework_fields(framework, system.chip.kind)
        overlaps = {field: getattr(strategy.profile, field) for field in OVERLAPS}
        strategy = replace(strategy, profile=replace(theirs["profile"], **overlaps))
    plan = make_plan(read.workload, read.mesh, system, strategy)
    table = load_table(name)
    return Imported(
        framework=name, title=table.title, path=path, meanings=read.meanings, nothing=read.nothing, plan=plan
    )


def find_framework_of(kind: Format, values: Mapping[str, Any], path: Path) -> str:
    """Return the name of the framework that has most of a file's options. Raises if no framework has one of them.

    kind: the file's format.
    """
    if "meshwright_plan" in values:
        raise MeshwrightError(f"{path} is a plan of meshwright; `meshwright plan {path}` prints it")
    tables = {name: load_table(name) for name in exchange_names()}
    count = str(values["mesh_dim"]).count(",") + 1 if "mesh_dim" in values else 0
    known = {
        name: sum(_has(table, option) for option in values)
        for name, table in tables.items()
        if table.format == kind and (not count or len(table.mesh_dim) == count)
    }
    best = max(known, key=lambda name: known[name], default="")
    if not best or not known[best]:
        titles = ", ".join(table.title for table in tables.values() if table.format == kind)
        raise MeshwrightError(f"{path} has no option of {titles}, which are read as such a file")
    return best


def _has(table: OptionTable, option: str) -> bool:
    """Whether a framework's table has an option."""
    patterns = [pattern for patterns in table.nothing.values() for pattern in patterns]
    return option in named_options(table) or any(fnmatchcase(option, pattern) for pattern in patterns)
