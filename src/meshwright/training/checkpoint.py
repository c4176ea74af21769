"""Checkpoints by Orbax: written whole or not at all, with checksums, and read back onto whatever mesh is wanted.

`checkpoints/STEP` has a folder for each part of the state (params, optimizer, …), the config that the run had then, and
the checksums of all these files, which are written last: a checkpoint without them is not whole.
"""

from __future__ import annotations

import json
import logging
import math
import shutil
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental.multihost_utils import process_allgather

from meshwright.errors import MeshwrightError
from meshwright.training.checksums import find_damage, write_checksums
from meshwright.training.step import State
from meshwright.units import show_bytes

Note = Callable[[str], None]
"""Takes a line that a user should read."""


class Checkpoints:
    """The checkpoints of a run directory; nothing is written before the first is saved.

    All processes of a run call the same methods in the same order.
    """

    def __init__(self, directory: Path, *, keep: int = 2) -> None:
        self._shown = directory / "checkpoints"
        self._directory = self._shown.absolute()
        self._keep = keep
        self._manager: ocp.CheckpointManager | None = None
        self._finishing: threading.Thread | None = None
        self._failure: Exception | None = None
        self._saving: int | None = None
        # Orbax logs the traceback of a write that failed in the background; it is raised here, as one line.
        logging.getLogger("absl").setLevel(logging.CRITICAL)

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, *_: object) -> None:
        """Wait for what is still being written."""
        try:
            self.wait()
        finally:
            if self._manager is not None:
                with suppress(Exception):  # A failure to write, which `wait` has raised.
                    self._manager.close()

    @property
    def steps(self) -> list[int]:
        """The steps of the checkpoints that are there, whole or not."""
        if not self._directory.is_dir():
            return []
        return sorted(int(path.name) for path in self._directory.iterdir() if path.name.isdigit())

    @property
    def latest(self) -> int | None:
        """The number of steps taken at the last checkpoint, None where there is none."""
        return max(self.steps, default=None)

    def save(self, step: int, state: State, config: dict[str, Any]) -> None:
        """Write the state after `step` steps and the config it belongs to; training goes on while it is written."""
        self.wait()
        if step == self.latest:
            return
        check_free(self._directory.parent, state, what=f"write checkpoint {step}")
        _ignore_closed_loops()
        parts: dict[str, Any] = {name: ocp.args.StandardSave(part) for name, part in state.items()}
        try:
            if self._manager is None:
                options = ocp.CheckpointManagerOptions(max_to_keep=self._keep, cleanup_tmp_directories=True)
                self._manager = ocp.CheckpointManager(self._directory, options=options)
            self._manager.save(step, args=ocp.args.Composite(config=ocp.args.JsonSave(config), **parts))
        except Exception as error:  # Orbax and TensorStore raise what they like, on a full disk too.
            raise self._write_error(step, error) from None
        self._saving = step
        self._finishing = threading.Thread(target=self._finish, args=(self._manager, step))
        self._finishing.start()

    def _finish(self, manager: ocp.CheckpointManager, step: int) -> None:
        """Wait until all processes have written their shards, then write the checksums."""
        try:
            manager.wait_until_finished()
            manager.check_for_errors()
            write_checksums(self._path(step), part=jax.process_index(), parts=jax.process_count())
        except Exception as error:  # Of another thread: `check` and `wait` raise it in the training's own.
            self._failure = error

    def check(self) -> None:
        """Raise where what is written beside the training has failed."""
        if self._finishing is not None and not self._finishing.is_alive():
            self.wait()

    def wait(self) -> None:
        """Wait for what is being written; raise where it has failed."""
        if self._finishing is not None:
            self._finishing.join()
            self._finishing = None
        if (failure := self._failure) is not None:
            self._failure = None
            raise self._write_error(self._saving or 0, failure)

    def _write_error(self, step: int, error: Exception) -> MeshwrightError:
        """The one line about a checkpoint that could not be written, of which nothing is left."""
        for half in self._directory.glob(f"{step}.orbax-checkpoint-tmp*"):
            shutil.rmtree(half, ignore_errors=True)
        if isinstance(error, MeshwrightError):
            return error
        if "No space left" in str(error) or "ENOSPC" in str(error):
            return MeshwrightError(f"cannot write checkpoint {step}: the disk is full")
        return MeshwrightError(f"cannot write checkpoint {step}: {str(error).strip().splitlines()[0][:200]}")

    def whole(self, on_note: Note, *, parts: tuple[str, ...] = ()) -> int | None:
        """The last checkpoint that is whole, of all processes' files; None where there is none at all.

        A damaged one is passed over with a note. parts: those of the state that have to be whole; by default all.
        """
        damaged: list[str] = []
        folders = (*parts, "config") if parts else ()
        for step in reversed(self.steps):
            share = {"part": jax.process_index(), "parts": jax.process_count()}
            damage = find_damage(self._path(step), folders=folders, **share)
            everywhere = (
                process_allgather(np.array(bool(damage))) if jax.process_count() > 1 else np.array(bool(damage))
            )
            if not everywhere.any():
                for line in damaged:
                    on_note(f"{line}; checkpoint {step} is whole and is taken")
                return step
            damaged.append(f"checkpoint {self._shown / str(step)} is damaged: {damage or 'another process says so'}")
        if damaged:
            raise MeshwrightError(f"{damaged[0]}; no other is whole")
        return None

    def restore(self, step: int, abstract: State) -> State:
        """The state after `step` steps, with the shapes and shardings of `abstract`, and only the parts that it has."""
        args = ocp.args.Composite(**{name: ocp.args.StandardRestore(part) for name, part in abstract.items()})
        options = ocp.CheckpointManagerOptions(read_only=True, create=False)
        try:
            with ocp.CheckpointManager(self._directory, options=options) as manager:
                found = manager.restore(step, args=args)
        except (ValueError, KeyError, TypeError, OSError) as error:
            raise MeshwrightError(
                f"cannot read {self._shown / str(step)}: {str(error).strip().splitlines()[0][:200]}"
            ) from None
        return {name: found[name] for name in abstract}

    def config(self, step: int) -> dict[str, Any]:
        """The config that a run had when it wrote a checkpoint."""
        return json.loads((self._path(step) / "config" / "metadata").read_bytes())

    def set_aside(self, step: int, why: str) -> Path:
        """Rename a checkpoint, so that it is none; its new path."""
        path = self._path(step)
        name = f"{step}.{why}"
        while (to := path.with_name(name)).exists():
            name += "+"
        return path.rename(to)

    def _path(self, step: int) -> Path:
        return self._directory / str(step)


def check_free(directory: Path, state: State, *, what: str) -> None:
    """Raise where the disk of a directory has not the bytes of a state (its shapes will do) free."""
    needed = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))
    while not directory.exists():
        directory = directory.parent
    if (free := shutil.disk_usage(directory).free) < needed:
        raise MeshwrightError(
            f"cannot {what}: the disk of {directory} has {show_bytes(free)} free, and a checkpoint takes"
            f" {show_bytes(needed)}; free {show_bytes(needed - free)} or more"
        )


def _ignore_closed_loops() -> None:
    """Keep TensorStore's threads from printing a traceback each where a write failed and its event loop is gone."""
    before = sys.excepthook
    if getattr(before, "ignores_closed_loops", False):
        return

    def hook(kind: type[BaseException], value: BaseException, trace: TracebackType | None) -> None:
        if str(value) != "Event loop is closed":
            before(kind, value, trace)

    hook.ignores_closed_loops = True  # pyright: ignore[reportFunctionMemberAccess]
    sys.excepthook = hook
