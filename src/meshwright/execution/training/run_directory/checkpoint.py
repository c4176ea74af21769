"""Checkpoints written by Orbax: atomic, with checksums, and readable on any mesh.

`checkpoints/STEP` has a folder for each part of the state (params, optimizer, …), the config of the run at that time,
and the checksums of all these files. It is written as `STEP.partial` and renamed when all its files are on disk, so a
process can be killed at any moment. Partial checkpoints are deleted when the next one is written.

Orbax's CheckpointManager (0.12.8) is atomic too, but has no checksums: after flipping one bit of an array's file, it
restored wrong values in 40 of 40 trials. Its hook before the rename runs only in the first process, which would have to
read the files of all processes. After a full disk, its partial files stay until the next process begins. It deletes old
checkpoints in place, so that a kill leaves a partial one.
"""

from __future__ import annotations

import errno
import json
import logging
import math
import os
import re
import shutil
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.experimental.multihost_utils import process_allgather

from meshwright.errors import MeshwrightError, TemporaryError
from meshwright.execution.training.run_directory.saving import Saving
from meshwright.execution.training.step import State
from meshwright.support.checksums import find_damage, has_checksums, write_checksums, write_left_checksums
from meshwright.support.files import write_error
from meshwright.units import show_bytes

if TYPE_CHECKING:
    import orbax.checkpoint as ocp

Note = Callable[[str], None]
"""Function that is called with a line for the user."""

PARTIAL = ".partial"
"""Suffix of the name of a directory that is not yet a checkpoint, or is being deleted."""

_POLL_SECONDS, _MOST_SECONDS = 0.05, 1200.0
"""How often the first process looks for the other processes' checksums, and for how long (the same as in Orbax)."""


class Checkpoints:
    """The checkpoints of a run directory. All processes of a run call the same methods in the same order.

    A context manager, which waits for pending writes on exit. A checkpoint's number is the number of steps taken.

    Args:
        directory: the run directory; nothing is written into it before the first checkpoint is saved.
        saving: which checkpoints are kept.
    """

    def __init__(self, directory: Path, saving: Saving | None = None) -> None:
        self._shown = directory / "checkpoints"
        self._directory = self._shown.absolute()
        self._saving = saving or Saving()
        self._writer: ocp.AsyncCheckpointer | None = None
        self._finishing: threading.Thread | None = None
        self._failure: Exception | None = None
        self._step, self._began, self._seconds = 0, 0.0, 0.0
        # Orbax and asyncio log tracebacks of failed background writes; here the error is raised, in one line.
        for name in ("absl", "asyncio"):
            logging.getLogger(name).setLevel(logging.CRITICAL)

    def __enter__(self) -> Checkpoints:
        # Import Orbax before the first step, not at the first checkpoint. Listing checkpoints does not need it.
        import orbax.checkpoint  # noqa: F401  # pyright: ignore[reportUnusedImport]

        return self

    def __exit__(self, *_: object) -> None:
        """Wait for pending writes."""
        try:
            self.wait()
        finally:
            if self._writer is not None:
                with suppress(Exception):  # A failed write, which `wait` has already raised.
                    self._writer.close()
                self.clean()

    @property
    def steps(self) -> list[int]:
        """The numbers of all checkpoints, ascending, including damaged ones."""
        if not self._directory.is_dir():
            return []
        return sorted(int(path.name) for path in self._directory.iterdir() if path.name.isdigit())

    @property
    def latest(self) -> int | None:
        """The number of the last checkpoint; None if there is none."""
        return max(self.steps, default=None)

    def save(self, step: int, state: State, about: Mapping[str, Any]) -> None:
        """Copy the state after `step` steps from the devices to the host, and begin to write it.

        Training can continue at once. After `commit`, the files become a checkpoint as soon as all are written.

        about: plain data to write with the state, by name.
        """
        import orbax.checkpoint as ocp

        self.wait()
        if jax.process_count() == 1:  # If one of several processes raised here, the others would wait for it.
            check_free(self._directory.parent, state, what=f"write checkpoint {step}")
        _ignore_closed_loops()
        arrays: dict[str, Any] = {name: ocp.args.StandardSave(part) for name, part in state.items()}
        data: dict[str, Any] = {name: ocp.args.JsonSave(part) for name, part in about.items()}
        self._step, self._began = step, time.perf_counter()
        try:
            if self._writer is None:
                self._writer = ocp.AsyncCheckpointer(ocp.CompositeCheckpointHandler())
            with suppress(Exception):  # An error of an earlier write that was never committed.
                self._writer.wait_until_finished()
            self.clean()
            self._writer.save(self._path(step, PARTIAL), args=ocp.args.Composite(**arrays, **data))
        except Exception as error:  # Orbax and TensorStore raise errors of many types, also for a full disk.
            raise self._write_error(error) from None

    def commit(self) -> None:
        """Let the files of the last `save` become a checkpoint. Call it after the metrics up to it are written."""
        self._finishing = threading.Thread(target=self._finish)
        self._finishing.start()

    def _finish(self) -> None:
        """Wait until all processes have written their shards, add checksums, and rename the partial directory."""
        partial, parts = self._path(self._step, PARTIAL), jax.process_count()
        try:
            assert self._writer is not None
            self._writer.wait_until_finished()
            self._writer.check_for_errors()
            write_checksums(partial, part=jax.process_index(), parts=parts)
            if jax.process_index() == 0:
                until = time.monotonic() + _MOST_SECONDS
                while not has_checksums(partial, parts=parts):
                    if time.monotonic() > until:
                        raise TimeoutError("other processes did not write their checksums")
                    time.sleep(_POLL_SECONDS)
                write_left_checksums(partial)
                partial.rename(self._path(self._step))
                _flush_directory(self._directory)
                for step in {*self.steps} - self._saving.kept(self.steps):
                    # Renamed first, so that a partly deleted checkpoint does not look like a damaged one.
                    shutil.rmtree(self._path(step).rename(self._path(step, PARTIAL)), ignore_errors=True)
            self._seconds = time.perf_counter() - self._began
        except Exception as error:  # This is a background thread: `check` and `wait` raise it in the training thread.
            self._failure = error

    def clean(self) -> None:
        """Delete files left by processes that were killed while they saved or deleted a checkpoint."""
        if jax.process_index() == 0:
            for pattern in (f"*{PARTIAL}*", "*.orbax-checkpoint-tmp*"):
                for path in self._directory.glob(pattern):
                    shutil.rmtree(path, ignore_errors=True)

    def check(self) -> float | None:
        """Return the seconds from `save` to the end of a write that ended since the last call; None if none did.

        Raises:
            MeshwrightError: the write failed.
        """
        return None if self._finishing is None or self._finishing.is_alive() else self.wait()

    def wait(self) -> float | None:
        """Wait for a pending write. Return the seconds since its `save`; None if none was pending."""
        if self._finishing is None:
            return None
        self._finishing.join()
        self._finishing = None
        if (failure := self._failure) is not None:
            self._failure = None
            raise self._write_error(failure)
        return self._seconds

    def _write_error(self, error: Exception) -> MeshwrightError:
        """Delete the files of a checkpoint that could not be written. Return the error to raise."""
        with suppress(OSError):
            self.clean()
        if isinstance(error, MeshwrightError):
            return error
        what = f"cannot write checkpoint {self._step}"
        number = error.errno if isinstance(error, OSError) else None
        if code := re.search(r"os_error_code='(\d+)'", str(error)):  # TensorStore's, in a line of 600 characters.
            number = int(code[1])
        if number is not None:
            path = self._shown / str(self._step)
            return MeshwrightError(str(write_error(path, OSError(number, os.strerror(number)))))
        return MeshwrightError(f"{what}: {(str(error).strip() or type(error).__name__).splitlines()[0][:200]}")

    def whole(self, on_note: Note, *, parts: tuple[str, ...] = ()) -> int | None:
        """Return the number of the last checkpoint that no process finds damaged; None if there are no checkpoints.

        All processes call this, and each checks a share of the files.

        Args:
            on_note: called with a line for each damaged checkpoint.
            parts: parts of the state that must be undamaged; all by default.

        Raises:
            MeshwrightError: there are checkpoints, and all are damaged.
        """
        # Files are read twice: here for their checksums, then by Orbax, from the page cache if they fit. Checksums of
        # the restored arrays would miss damage in files that a restore does not read, and arrays may be cast. All
        # processes must also agree on a checkpoint before any of them restores it, because Orbax's barriers wait for
        # all.
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

    def restore(self, step: int, abstract: State, *, source: Mapping[str, str] | None = None) -> State:
        """Return the state of checkpoint `step`, with the parts, shapes, dtypes and shardings of `abstract`.

        Other dtypes are cast while reading. source: {part of `abstract`: its name in the checkpoint, if another}.

        Raises:
            MeshwrightError: the checkpoint cannot be read, or has other parts or shapes.
        """
        import orbax.checkpoint as ocp

        found: State = {}
        for name, wanted in abstract.items():
            folder = self._path(step) / (source or {}).get(name, name)
            try:
                with ocp.Checkpointer(ocp.StandardCheckpointHandler()) as reader:
                    found[name] = reader.restore(folder, args=ocp.args.StandardRestore(wanted))
            except (ValueError, KeyError, TypeError, OSError) as error:
                raise MeshwrightError(
                    f"cannot read {self._shown / str(step)}: {str(error).strip().splitlines()[0][:200]}"
                ) from None
        return found

    def config(self, step: int) -> dict[str, Any]:
        """Return the config that a run had when it wrote a checkpoint."""
        return self.about(step, "config") or {}

    def about(self, step: int, name: str) -> dict[str, Any] | None:
        """Return the plain data of this name in a checkpoint (see `save`); None if it has none."""
        path = self._path(step) / name / "metadata"
        return json.loads(path.read_bytes()) if path.is_file() else None

    def set_aside(self, step: int, why: str) -> Path:
        """Rename a checkpoint to STEP.`why`, so that it no longer counts as one. Return its new path."""
        path = self._path(step)
        name = f"{step}.{why}"
        while (to := path.with_name(name)).exists():
            name += "+"
        return path.rename(to)

    def set_aside_nan(self, step: int) -> None:
        """Rename checkpoint `step`, if it exists, because the step after it gave NaN; a resume takes an earlier one."""
        self.wait()
        if jax.process_index() == 0 and step in self.steps:
            self.set_aside(step, "nan")

    def _path(self, step: int, ending: str = "") -> Path:
        return self._directory / f"{step}{ending}"


def check_free(directory: Path, state: State, *, what: str) -> None:
    """Raise a `TemporaryError` if the disk of a directory has less free space than the bytes of a state.

    Args:
        directory: the directory, which may not exist yet.
        state: the state; its arrays may be abstract.
        what: what needs the space, for the error.
    """
    needed = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))
    while not directory.exists():
        directory = directory.parent
    if (free := shutil.disk_usage(directory).free) < needed:
        raise TemporaryError(
            f"cannot {what}: the disk of {directory} has {show_bytes(free)} free, and a checkpoint takes"
            f" {show_bytes(needed)}; free {show_bytes(needed - free)} or more"
        )


def _flush_directory(directory: Path) -> None:
    """Write the names in a directory to disk, so that they survive a power failure, if its file system supports it."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def _ignore_closed_loops() -> None:
    """Suppress the tracebacks that TensorStore's threads print after a failed write, once their loop is closed."""
    before = sys.unraisablehook
    if getattr(before, "ignores_closed_loops", False):
        return

    def hook(unraisable: sys.UnraisableHookArgs) -> None:
        if str(unraisable.exc_value) != "Event loop is closed":
            before(unraisable)

    hook.ignores_closed_loops = True  # pyright: ignore[reportFunctionMemberAccess]
    sys.unraisablehook = hook
