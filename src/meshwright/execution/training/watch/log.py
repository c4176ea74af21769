"""Write the measurements of each step (rows) to `metrics.jsonl`, TensorBoard and Weights & Biases."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

from meshwright.errors import MeshwrightError
from meshwright.execution.training.run_directory.checkpoint import Note
from meshwright.execution.training.run_directory.run import Row, append_metrics
from meshwright.execution.training.watch.weights_and_biases import WandbRun
from meshwright.record import Record, record_from_json
from meshwright.support.files import write_file

_SPEED = ("tokens_per_second", "mfu", "memory_peak_bytes", "host_peak_bytes")
"""Fields of a row whose tags begin with `speed/`, besides seconds."""
_NOT_SHOWN = ("step", "time", "began_at")
"""Fields of a row that are numbers but no measurements, and get no tag."""

COMPILED = "compiled.json"
"""File of a run directory with the record of the compiled step, written by the last process that trained."""


def read_compiled(directory: Path) -> Record | None:
    """Return the record of a run's compiled step; None if the run has no such file, as in older versions.

    Raises:
        MeshwrightError: the file cannot be read.
    """
    path = directory / COMPILED
    try:
        return record_from_json(json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else None
    except OSError as error:
        raise MeshwrightError(f"cannot read {path}: {error.strerror}") from None
    except ValueError as error:
        raise MeshwrightError(f"{path} is not the record of a compiled step: {str(error).splitlines()[0]}") from None


class _Writer(Protocol):
    def write(self, step: int, time: float, values: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class RunLog:
    """Writes the rows of a run, in its first process. A context manager, which closes the outputs on exit.

    `begin` must be called after the first step, before its row is added.

    Args:
        on_note: called with a line for the user if an output fails.
        wandb: project of Weights & Biases; None for no such output.
        config: the settings of the run, which Weights & Biases shows.
    """

    def __init__(
        self,
        directory: Path,
        on_note: Note,
        *,
        wandb: str | None = None,
        config: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        self._directory = directory
        self._on_note = on_note
        self._wandb, self._config = wandb, config
        self._writers: list[_Writer] = []
        self._last: Row = {}
        self._unwritten: list[Row] = []
        self._has_gaps = False

    def __enter__(self) -> RunLog:
        return self

    def __exit__(self, *_: object) -> None:
        for writer in self._writers:
            writer.close()

    def begin(self, start: int, compiled: Record) -> None:
        """Open TensorBoard's and Weights & Biases' outputs, and write the record of the compiled step.

        Args:
            start: number of steps that earlier processes took.
            compiled: record of the compiled step.
        """
        from meshwright.execution.training.watch.tensorboard import (
            TensorBoardEvents,  # Needs the extra `train`; `report`, which only reads a run, does not.
        )

        write_file(self._directory / COMPILED, json.dumps(compiled.to_json(), indent=2) + "\n")
        self._writers.append(TensorBoardEvents(self._directory, start))
        if self._wandb is not None:
            try:
                self._writers.append(WandbRun(self._directory, self._wandb, self._config))
            except MeshwrightError as error:  # An unreachable server must not end the run.
                self._on_note(str(error))

    def add(self, row: Row) -> None:
        """Write the row of a step."""
        self._last = row
        self._append(row)
        self._write(row["step"], row)

    def add_later(self, fields: Row, *, step: int | None = None) -> None:
        """Append measurements that arrive after the row of their step. step: by default the last step."""
        of = self._last["step"] if step is None else step
        self._append({"step": of} | fields)
        self._write(of, fields)

    def flush(self) -> None:
        """Write the lines that could not be written to `metrics.jsonl` earlier; raise if they still cannot be."""
        while self._unwritten:
            append_metrics(self._directory, self._unwritten[0])
            del self._unwritten[0]

    def _append(self, fields: Row) -> None:
        """Add a line to `metrics.jsonl`; on a full disk, keep the line for later."""
        is_first = not self._unwritten
        self._unwritten.append(fields)
        try:
            self.flush()
        except MeshwrightError as error:
            if not self._directory.is_dir():
                raise
            if is_first:
                self._on_note(f"{error}; training continues, and its metrics are kept until they can be written")

    def _write(self, step: int, fields: Row) -> None:
        values = scalars(fields)
        for writer in self._writers:
            try:
                writer.write(step + 1, self._last["time"], values)
            except MeshwrightError as error:
                if not self._has_gaps:
                    self._on_note(f"{error}: curves have a gap; training continues")
                self._has_gaps = True


def scalars(row: Row) -> dict[str, float]:
    """Return the numbers of a row by TensorBoard tag, such as `train/loss`, `speed/mfu` and `eval/TASK/acc`."""
    found = {
        _tag(name): float(value)
        for name, value in row.items()
        if name not in _NOT_SHOWN and isinstance(value, int | float) and not isinstance(value, bool)
    }
    for task, figures in row.get("eval_tasks", {}).items():
        # The number of questions never changes, and the standard error of a single question is None.
        found |= {f"eval/{task}/{name}": v for name, v in figures.items() if name != "questions" and v is not None}
    return found


def _tag(name: str) -> str:
    if name.startswith("eval_"):
        return f"eval/{name.removeprefix('eval_')}"
    return f"speed/{name}" if name in _SPEED or name.endswith("_seconds") else f"train/{name}"
