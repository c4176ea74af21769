"""Checkpoints by Orbax: written whole or not at all, and read back onto whatever mesh the state is wanted on."""

from __future__ import annotations

from pathlib import Path

import orbax.checkpoint as ocp

from meshwright.training.step import State


class Checkpoints:
    """The checkpoints of a run directory."""

    def __init__(self, directory: Path, *, keep: int = 2) -> None:
        options = ocp.CheckpointManagerOptions(max_to_keep=keep)
        self._manager = ocp.CheckpointManager((directory / "checkpoints").absolute(), options=options)

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, *_: object) -> None:
        """Wait for what is still being written."""
        self._manager.close()

    @property
    def latest(self) -> int | None:
        """The number of steps taken at the last checkpoint, None where there is none."""
        return self._manager.latest_step()

    def save(self, step: int, state: State) -> None:
        """Write the state after `step` steps; the write goes on while training does."""
        if step != self.latest:
            self._manager.save(step, args=ocp.args.StandardSave(state))

    def restore(self, step: int, abstract: State) -> State:
        """The state after `step` steps, with the shapes and shardings of `abstract`."""
        return dict(self._manager.restore(step, args=ocp.args.StandardRestore(abstract)))
