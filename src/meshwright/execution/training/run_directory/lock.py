"""The lock of a run directory: one process trains in it at a time."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import threading
import time
from contextlib import suppress
from pathlib import Path

from meshwright.errors import TemporaryError
from meshwright.execution.training.run_directory.checkpoint import Note
from meshwright.support.files import check_new_directory, write_error

BEAT_SECONDS, WATCH_SECONDS = 5.0, 30.0
"""How often a process touches its lock file, and how long another one waits for that (NFS shows it 3 s late)."""


class RunLock:
    """The lock of a run directory, held from construction to `release`: a file with the process id and the host name.

    The lock of a process that ended without releasing it is taken over, with a note. The operating system's lock of the
    file (flock) decides, so a reused process id is harmless. On file systems without such locks, or with locks per host
    only, the holder shows that it is alive by touching the file.

    Args:
        directory: the run directory, which is created if it does not exist.

    Raises:
        TemporaryError: another process trains in the directory.
    """

    def __init__(self, directory: Path, on_note: Note) -> None:
        check_new_directory(directory)
        self._on_note = on_note
        self._releasing, self._is_released, self._ended = threading.Lock(), False, threading.Event()
        self._path = directory / "lock"
        self._made = [path for path in (directory, *directory.parents) if not path.exists()]
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self._descriptor = self._open()
        except OSError as error:
            raise write_error(directory, error) from None
        if holder := self._holder():
            on_note(f"{directory} was locked by {holder}, which has ended; its lock is taken over")
        own = json.dumps({"process": os.getpid(), "machine": socket.gethostname()}).encode()
        try:
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, own, 0)
        except OSError as error:
            os.close(self._descriptor)
            raise TemporaryError(str(write_error(self._path, error))) from None
        self._beat = threading.Thread(target=self._touch, daemon=True)
        self._beat.start()

    def _touch(self) -> None:
        """Touch the lock file every few seconds, to show other processes that this one is alive."""
        while not self._ended.wait(BEAT_SECONDS):
            with suppress(OSError):
                os.utime(self._path)

    def _open(self) -> int:
        """Open and lock the lock file. Return its descriptor; a `TemporaryError` if another process trains."""
        while True:
            descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o644)
            self._descriptor = descriptor
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                is_ours = True
            except BlockingIOError:
                is_ours = False
            except OSError:  # A file system without such locks.
                is_ours = not self._is_here() or not self._is_touched()
            if not is_ours or (not self._is_here() and self._is_touched()):
                holder = self._holder() or "another process"
                os.close(descriptor)
                raise TemporaryError(
                    f"{self._path.parent} is in use: {holder} trains in it; wait until it ends, or stop it"
                )
            # The previous holder may have deleted the file after it was opened here and before it was locked.
            if self._path.exists() and os.path.samestat(os.fstat(descriptor), self._path.stat()):
                return descriptor
            os.close(descriptor)

    def _read(self) -> tuple[int, str] | None:
        """Return the process id and the host name in the file; None if the file is empty or damaged."""
        try:
            data = json.loads(os.pread(self._descriptor, 1000, 0))
            return int(data["process"]), str(data["machine"])
        except (ValueError, KeyError, TypeError):
            return None

    def _holder(self) -> str:
        """Return a description of the process that wrote the file; empty if the file is empty."""
        if (found := self._read()) is None:
            return ""
        process, machine = found
        return f"process {process}" + ("" if machine == socket.gethostname() else f" on {machine}")

    def _is_here(self) -> bool:
        """Whether a process of this machine wrote the file, or the file is empty."""
        found = self._read()
        return found is None or found[1] == socket.gethostname()

    def _is_touched(self) -> bool:
        """Wait up to `WATCH_SECONDS`; return whether the holder touches the file, which shows that it is alive."""
        if self._read() is None:
            return False
        before, until = os.stat(self._path).st_mtime_ns, time.monotonic() + WATCH_SECONDS
        self._on_note(f"{self._path} is that of {self._holder()}: waiting {WATCH_SECONDS:g} s for a sign of it")
        while time.monotonic() < until:
            time.sleep(min(1.0, WATCH_SECONDS / 10))
            try:
                with self._path.open("rb") as file:  # NFS asks its server for the file's attributes on each open.
                    if os.fstat(file.fileno()).st_mtime_ns != before:
                        return True
            except FileNotFoundError:  # The lock was released.
                return False
        return False

    def release(self) -> None:
        """Delete the lock file, and the directories created for it if they are empty."""
        with self._releasing:  # If a signal ends the process, another thread calls this.
            if self._is_released:
                return
            self._is_released = True
        self._ended.set()
        self._path.unlink(missing_ok=True)
        os.close(self._descriptor)
        for directory in self._made:
            try:
                directory.rmdir()
            except OSError:
                return
