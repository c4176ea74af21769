"""Checkpointing in the training loop: when to save, how long steps wait for it, and what happens if saving fails.

A failed checkpoint, for example on a full disk, does not end the run: it is reported and counted (`failed_saves`), and
the next checkpoint is tried. Only the last checkpoint of a run must succeed. With several processes, a process that
cannot write its part of any checkpoint ends the run with its error.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from meshwright.errors import MeshwrightError
from meshwright.execution.training.interrupt import Interruption
from meshwright.execution.training.run_directory.checkpoint import Checkpoints, Note
from meshwright.execution.training.run_directory.run import NotFiniteError
from meshwright.execution.training.run_directory.saving import Saving
from meshwright.execution.training.step import State
from meshwright.execution.training.watch.log import RunLog


class Saver:
    """Writes the checkpoints of a training run.

    Args:
        saving: when checkpoints are written.
        in_order: converts a state to the form of checkpoints (`restart.order_of_checkpoints`).
        about: returns the plain data to save with a checkpoint, from its number of steps.
        log: the log of the first process; None in the others.
        allows_infinity: whether a state may have infinite values, such as an optimizer's best loss so far.

    Attributes:
        is_due: whether a checkpoint is due, as of the last `decide`.
    """

    def __init__(
        self,
        saving: Saving,
        directory: Path,
        checkpoints: Checkpoints,
        in_order: Callable[[State], State],
        about: Callable[[int], Mapping[str, Any]],
        log: RunLog | None,
        on_note: Note,
        *,
        allows_infinity: bool = False,
    ) -> None:
        self._saving = saving
        self._directory = directory
        self._checkpoints = checkpoints
        self._in_order = in_order
        self._about = about
        self._log = log
        self._on_note = on_note
        self._allows_infinity = allows_infinity
        self._failed = 0
        self._saved_at = time.monotonic()  # Not the wall clock, which may be set while a run trains.
        self._step: int | None = None
        self.is_due = False

    def decide(self, taken: int, interruption: Interruption, *, waits: bool) -> None:
        """Set `is_due` to whether a checkpoint is due after `taken` steps, equally on all processes.

        waits: as in `Interruption.agree`.
        """
        minutes = (time.monotonic() - self._saved_at) / 60
        is_late = interruption.agree(0 < self._saving.minutes <= minutes, waits=waits)
        self.is_due = is_late or self._saving.is_due(taken)

    def check(self) -> None:
        """Log a checkpoint whose write ended since the last call, or report that it failed."""
        try:
            self._log_written(self._checkpoints.check())
        except MeshwrightError as error:
            self._note_failure(error)

    def save(self, taken: int, state: State, *, is_last: bool) -> float:
        """Save the state after `taken` steps. Return the seconds that training waited.

        is_last: whether the run ends with this checkpoint; then wait until it is written.

        Raises:
            NotFiniteError: the state has NaN, or infinite values that are not allowed.
            MeshwrightError: the last checkpoint cannot be written.
        """
        began = self._saved_at = time.monotonic()
        try:
            self._log_written(self._checkpoints.wait())
        except MeshwrightError as error:
            self._note_failure(error)
        saved = self._in_order(state)
        if not all(map(bool, _are_numbers(saved, allows_infinity=self._allows_infinity))):
            raise NotFiniteError(f"the state has nan or inf after step {taken}; training stops")
        try:
            self._checkpoints.save(taken, saved, self._about(taken))
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
        """Log measurements that arrive after the row of their step, by default the last step."""
        if self._log is not None:
            self._log.add_later(fields, step=step)

    def _log_written(self, seconds: float | None) -> None:
        """Log the time that writing the last checkpoint took, in the row of its step; nothing for None."""
        if seconds is not None:
            self._log_later({"save_background_seconds": seconds}, step=self._step)

    def _note_failure(self, error: MeshwrightError) -> None:
        """Report a failed checkpoint; the run continues.

        Raise the error if the run cannot continue: its directory is gone, or there are several processes, of which the
        others would wait 20 minutes for this one's part of the checkpoint, until Orbax gives up.
        """
        if not self._directory.is_dir() or jax.process_count() > 1:
            raise error
        self._failed += 1
        self._on_note(
            f"{error}; training continues and tries again at its next checkpoint ({self._failed} not written)"
        )
        self._log_later({"failed_saves": self._failed})


@partial(jax.jit, static_argnames="allows_infinity")
def _are_numbers(state: State, *, allows_infinity: bool) -> list[Array]:
    """Return, for each floating-point array, whether it has no NaN and, unless allowed, no infinity."""
    leaves = [leaf for leaf in jax.tree.leaves(state) if jnp.issubdtype(leaf.dtype, jnp.floating)]
    return [(~jnp.isnan(leaf) if allows_infinity else jnp.isfinite(leaf)).all() for leaf in leaves]
