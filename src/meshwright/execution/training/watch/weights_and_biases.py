"""Metrics sent to Weights & Biases, whose library is optional."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from meshwright.errors import MeshwrightError
from meshwright.support.files import write_file

ID_FILE = "wandb_id"
"""File of a run directory with the run's id at Weights & Biases, under which a resumed run continues."""


def load_wandb() -> Any:
    """Return the library's module; a `MeshwrightError` if it is not installed."""
    try:
        return importlib.import_module("wandb")
    except ImportError:
        raise MeshwrightError("--wandb needs the library of Weights & Biases: pip install wandb") from None


class WandbRun:
    """A run at Weights & Biases; steps are counted from 1, as they are printed."""

    def __init__(self, directory: Path, project: str, config: Mapping[str, Any]) -> None:
        wandb, file = load_wandb(), directory / ID_FILE
        own = {"id": file.read_text(encoding="utf-8").strip(), "resume": "allow"} if file.is_file() else {}
        try:
            self._run = wandb.init(project=project, dir=str(directory), name=directory.name, config=dict(config), **own)
        except Exception as error:  # The library has its own errors: wrong key, no network, unknown project.
            raise MeshwrightError(
                f"Weights & Biases cannot be reached: {str(error).splitlines()[0][:200]}; the run continues without it"
            ) from None
        write_file(file, f"{self._run.id}\n")

    def write(self, step: int, time: float, values: Mapping[str, float]) -> None:
        """Log the values of a step, {tag: value}. time: seconds since 1970."""
        self._run.log({**values, "_timestamp": time}, step=step)

    def close(self) -> None:
        """Send pending data."""
        self._run.finish()
