"""The config of a run of `meshwright.fit`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from meshwright.errors import MeshwrightError
from meshwright.execution.training.run_directory.saving import Saving
from meshwright.record import Record
from meshwright.support.field_types import from_data
from meshwright.units import show_mesh


@dataclass(frozen=True, kw_only=True)
class FitConfig:
    """The settings of a run, and the mesh and layout of its step, as stored in `config.json`."""

    program: str
    """Name of the step."""
    steps: int
    """Total number of steps, including those before the run was resumed."""
    saving: Saving
    """When checkpoints are saved, and how many are kept."""
    mesh: dict[str, int]
    """Degree of each mesh axis, outermost first."""
    hardware: str
    """The plan's hardware, as `v5e:4x4`; without a plan, JAX's kind of device and the number of devices."""
    table: dict[str, list[str]]
    """{class: its mesh axes}, the table of `meshwright.apply`. A class: dims that the step shows to be equal."""
    store: tuple[str, ...]
    """Mesh axes that further split the state between steps."""
    metrics: tuple[str, ...]
    """Names of the values that the step returns."""
    predicted: Record | None = None
    """The plan's prediction; None if a table gave the layout."""
    usable_bytes: float | None = None
    """Memory of a device that a program can use; None if the hardware is not described."""

    @property
    def mesh_text(self) -> str:
        """The mesh as in the rows of `metrics.jsonl`: `dp=2,tp=4`."""
        return show_mesh(self.mesh)

    def to_json(self) -> dict[str, Any]:
        """Return the config as plain data."""
        return json.loads(json.dumps(asdict(self)))


def read_fit_config(directory: Path) -> FitConfig | None:
    """Return the config of a run of `meshwright.fit`; None if the directory does not hold one.

    Raises:
        MeshwrightError: the file is damaged.
    """
    path = directory / "config.json"
    try:
        data = json.loads(path.read_bytes()) if path.is_file() else None
    except (OSError, ValueError):
        return None
    if not isinstance(data, Mapping) or "program" not in data:
        return None
    try:
        return from_data(FitConfig, data)
    except MeshwrightError as error:
        raise MeshwrightError(f"{path} is not the config of a run: {error}") from None
