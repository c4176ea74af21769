"""What the loop does about checkpoints: when one is due, how long it stands still for one, and what of one that failed.

A checkpoint that cannot be written, on a disk that is full for a while, does not end a run of weeks: it goes on, says
so, counts it (`failed_saves`), and tries again at the next. Only the last one has to be written. Of several processes
each has to write its part of every one: a process that cannot ends the run, in one line that names it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from meshwright.errors import MeshwrightError
from meshwright.training.interrupt import Interruption
from meshwright.training.run_directory.checkpoint import Checkpoints, Note
from meshwright.training.run_directory.run import NotFiniteError, RunConfig
from meshwright.training.step import State
from meshwright.training.watch import RunLog


class Saver:
    """The checkpoints of a run that trains.

    Args:
        in_order: a state as checkpoints have it.
        about: plain data that is saved beside each.
        log: of the first process, which has what was measured; None in the others.
    """

    def __init__(
        self,
        config: RunConfig,
        directory: Path,
        checkpoints: Checkpoints,
        in_order: Callable[[State], State],
        about: Mapping[str, Any],
        log: RunLog | None,
        on_note: Note,
    ) -> None:
        self._saving = config.saving
        self._directory = directory
        self._checkpoints = checkpoints
        self._in_order = in_order
        self._about = about
        self._log = log
        self._on_note = on_note
        self._failed = 0
        self._saved_at = time.monotonic()  # No clock that is set while a run trains.
        self._step: int | None = None
        self.is_due = False

    def decide(self, taken: int, interruption: Interruption, *, waits: bool) -> None:
        """Find whether a checkpoint is due after so many steps, the same for all processes: `is_due`."""
        minutes = (time.monotonic() - self._saved_at) / 60
        is_late = interruption.agree(0 < self._saving.minutes <= minutes, waits=waits)
        self.is_due = is_late or self._saving.is_due(taken)

    def check(self) -> None:
        """Log the checkpoint that is there since the last call, or note that it could not be written."""
        try:
            self._log_written(self._checkpoints.check())
        except MeshwrightError as error:
            self._note_failure(error)

    def save(self, taken: int, state: State, *, is_last: bool) -> float:
        """Write the state after so many steps, and return the seconds that steps waited for it: until it is copied.

        Raises:
            NotFiniteError: where a parameter is no number.
            MeshwrightError: where the last state of a run cannot be written.
        """
        began = self._saved_at = time.monotonic()
        try:
            self._log_written(self._checkpoints.wait())
        except MeshwrightError as error:
            self._note_failure(error)
        saved = self._in_order(state)
        if not all(bool(is_finite) for is_finite in _are_finite(saved)):
            raise NotFiniteError(f"parameters are no numbers (nan or inf) after step {taken}; training stops")
        try:
            self._checkpoints.save(taken, saved, self._about)
            self._step = taken - 1
            if not is_last:
                self._log_later({"save_seconds": time.monotonic() - began})
            if self._log is not None:
                self._log.flush()
            self._checkpoints.commit()
        except MeshwrightError as error:
            if is_last:
                raise
            self._note_failure(error)
        if is_last:
            self._log_written(self._checkpoints.wait())
            self._log_later({"save_seconds": time.monotonic() - began})
        return time.monotonic() - began

    def _log_later(self, fields: dict[str, Any], *, step: int | None = None) -> None:
        """Log what was measured after the row of a step, by default of the last."""
        if self._log is not None:
            self._log.add_later(fields, step=step)

    def _log_written(self, seconds: float | None) -> None:
        """Log how long a checkpoint took until it was there, beside the step that it is of."""
        if seconds is not None:
            self._log_later({"save_background_seconds": seconds}, step=self._step)

    def _note_failure(self, error: MeshwrightError) -> None:
        """Say that a checkpoint was not written and that the run goes on.

        Raises the error where it cannot: the directory is gone, or this is one of several processes. The others wait
        for this one's part of the checkpoint, until Orbax gives up after 20 minutes.
        """
        if not self._directory.is_dir() or jax.process_count() > 1:
            raise error
        self._failed += 1
        self._on_note(f"{error}; training goes on and tries again at its next checkpoint ({self._failed} not written)")
        self._log_later({"failed_saves": self._failed})


@jax.jit
def _are_finite(state: State) -> list[Array]:
    """Whether all numbers of each array are finite."""
    leaves = [leaf for leaf in jax.tree.leaves(state) if jnp.issubdtype(leaf.dtype, jnp.floating)]
    return [jnp.isfinite(leaf).all() for leaf in leaves]
