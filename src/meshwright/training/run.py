"""A run directory: `config.json` (what runs), `metrics.jsonl` (a line a step), `checkpoints/` (by Orbax)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from meshwright.errors import MeshwrightError
from meshwright.families import workload_from_data
from meshwright.mesh import MeshShape
from meshwright.step import DEFAULT, Strategy, Workload, strategy_from_data
from meshwright.training.optimizer import Optimizer


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """All that a run depends on."""

    workload: Workload
    mesh: MeshShape
    hardware: str
    optimizer: Optimizer
    steps: int
    seed: int = 0
    data: tuple[str, ...] = ()
    save_every: int = 0
    """Steps between checkpoints; 0 keeps only the last."""
    strategy: Strategy = DEFAULT


def write_config(directory: Path, config: RunConfig) -> None:
    """Make the run directory and put `config.json` in it."""
    directory.mkdir(parents=True, exist_ok=True)
    partial = directory / "config.json.partial"
    partial.write_text(json.dumps(asdict(config), indent=2) + "\n")
    partial.rename(directory / "config.json")


def read_config(directory: Path) -> RunConfig:
    """The config of a run; a directory that holds none is an error."""
    path = directory / "config.json"
    if not path.is_file():
        raise MeshwrightError(f"no run in {str(directory)!r}: it has no config.json; `meshwright train` makes one")
    try:
        data = json.loads(path.read_text())
        return RunConfig(
            workload=workload_from_data(data.pop("workload")),
            mesh=MeshShape(**data.pop("mesh")),
            optimizer=Optimizer(**data.pop("optimizer")),
            data=tuple(data.pop("data")),
            strategy=strategy_from_data(data.pop("strategy", {})),
            **data,
        )
    except (ValueError, KeyError, TypeError) as error:
        raise MeshwrightError(f"{path} is not the config of a run: {error}") from None


def append_metrics(directory: Path, row: dict[str, Any]) -> None:
    """Add a step's line to `metrics.jsonl`."""
    with (directory / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")


def read_metrics(directory: Path) -> list[dict[str, Any]]:
    """The lines of `metrics.jsonl`; of a step run twice, before and after a resume, the later one."""
    return list({row["step"]: row for row in _lines(directory / "metrics.jsonl")}.values())


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """Each whole line; a run that was killed may have left a last one in part."""
    for line in path.read_text().splitlines() if path.is_file() else ():
        try:
            yield json.loads(line)
        except ValueError:
            return
