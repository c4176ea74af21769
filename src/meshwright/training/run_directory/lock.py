"""The lock of a run directory: one process trains in it at a time."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import threading
import time
from pathlib import Path

from meshwright.errors import MeshwrightError
from meshwright.files import check_new_directory, write_error
from meshwright.training.run_directory.checkpoint import Note

QUIET_SECONDS = 600.0
"""After so long without a line of metrics, the lock of another machine's process is no longer believed."""


class RunLock:
    """A file `lock` with the process id and the machine, there while a process trains; it makes the directory.

    The lock of a process that has ended without releasing it is taken over, with a note. The system's own lock on the
    file (flock) decides, so that an id that is used again for another process misleads nobody; where the file system
    has no such locks, or another machine left the lock, the id and the time of the last line of metrics do.
    """

    def __init__(self, directory: Path, on_note: Note) -> None:
        check_new_directory(directory)
        self._releasing, self._is_released = threading.Lock(), False
        self._path = directory / "lock"
        self._made = [path for path in (directory, *directory.parents) if not path.exists()]
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self._descriptor = self._open()
        except OSError as error:
            raise write_error(directory, error) from None
        if holder := self._holder():
            on_note(f"{directory} was locked by {holder}, which has ended; its lock is taken over")
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, json.dumps({"process": os.getpid(), "machine": socket.gethostname()}).encode(), 0)

    def _open(self) -> int:
        """A descriptor of the lock that no other process has locked."""
        while True:
            descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o644)
            self._descriptor = descriptor
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                is_ours = True
            except BlockingIOError:
                is_ours = False
            except OSError:  # A file system without such locks.
                is_ours = not self._is_alive()
            holder = self._holder()
            if not is_ours or self._is_elsewhere():
                os.close(descriptor)
                raise MeshwrightError(
                    f"{self._path.parent} is in use: {holder or 'another process'} trains in it; wait until it ends, or"
                    f" stop it (where it is gone for certain, delete {self._path})"
                )
            # The process before may have deleted the file between our opening and our locking it.
            if self._path.exists() and os.path.samestat(os.fstat(descriptor), self._path.stat()):
                return descriptor
            os.close(descriptor)

    def _read(self) -> tuple[int, str] | None:
        """The process id and the machine in the file, None where it has none."""
        try:
            data = json.loads(os.pread(self._descriptor, 1000, 0))
            return int(data["process"]), str(data["machine"])
        except (ValueError, KeyError, TypeError):
            return None

    def _holder(self) -> str:
        """Who wrote the lock, in words."""
        if (found := self._read()) is None:
            return ""
        process, machine = found
        return f"process {process}" + ("" if machine == socket.gethostname() else f" on {machine}")

    def _is_alive(self) -> bool:
        """Whether the process in the lock runs on this machine."""
        found = self._read()
        if found is None or found[1] != socket.gethostname():
            return False
        try:
            os.kill(found[0], 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            pass
        return True

    def _is_elsewhere(self) -> bool:
        """Whether a process of another machine left the lock, and wrote something not long ago."""
        found = self._read()
        if found is None or found[1] == socket.gethostname():
            return False
        files = (self._path, self._path.with_name("metrics.jsonl"))
        return time.time() - max(file.stat().st_mtime for file in files if file.exists()) < QUIET_SECONDS

    def release(self) -> None:
        """Delete the lock, and the directories that were made for it if nothing else was put there."""
        with self._releasing:  # Where a signal ends the process, another thread releases it.
            if self._is_released:
                return
            self._is_released = True
        self._path.unlink(missing_ok=True)
        os.close(self._descriptor)
        for directory in self._made:
            try:
                directory.rmdir()
            except OSError:
                return
