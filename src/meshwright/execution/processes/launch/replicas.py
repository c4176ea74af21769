"""Server replicas on this machine, one process each, restarted when they end or hang."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence

import httpx

from meshwright.errors import MeshwrightError
from meshwright.execution.processes.launch.children import Exit, meshwright_command

REPLICA = "MESHWRIGHT_REPLICA"
"""Environment variable set for replicas, which end when their standard input closes: when this process is gone."""

ASK_SECONDS = 2.0
"""Seconds between two polls of a replica, and timeout of a poll."""

SILENT_SECONDS = 20.0
"""A replica that has not answered for this long is killed and restarted."""

LONGEST_WAIT_SECONDS = 60.0
"""The longest wait before a restart. The first wait is 1 s; each restart that does not become ready doubles it."""

END_SECONDS = 10.0
"""Seconds that a replica may take to end after its grace period."""


class Replica:
    """A server in its own process, which starts at once and is started again when it ends or hangs.

    Args:
        number: the replica's number, from 0.
        words: arguments of `meshwright`: a `serve` command.
        environment: environment variables added to this process's own.
        say: called, in threads, with lines for the user.

    Attributes:
        starts: how many times the replica became ready.
        url: its address; None while it accepts no requests.
    """

    def __init__(
        self, number: int, words: Sequence[str], environment: Mapping[str, str], say: Callable[[str], None]
    ) -> None:
        self.number, self.starts = number, 0
        self.url: str | None = None
        self.error: str | None = None
        """The reason why the replica never became ready."""
        self._command, self._environment, self._say = meshwright_command(words), environment, say
        self._process: subprocess.Popen[str] | None = None
        self._is_stopping, self._settled = threading.Event(), threading.Event()
        self._last_line = ""
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Wait until the replica accepts requests for the first time, or has failed to start."""
        self._settled.wait()

    def stop(self) -> None:
        """Tell the replica to answer its accepted requests and end."""
        self._is_stopping.set()
        if (process := self._process) is not None:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGTERM)

    def end(self, seconds: float) -> None:
        """Wait `seconds` for the replica to end after `stop`; then kill it."""
        process = self._process
        if process is not None:
            try:
                process.wait(seconds)
            except subprocess.TimeoutExpired:
                process.kill()
        self._thread.join(END_SECONDS)

    def _run(self) -> None:
        wait, was_ready = 1.0, False
        while not self._is_stopping.is_set():
            code, is_ready = self._attempt()
            self.url = None
            if self._is_stopping.is_set():
                break
            how = Exit(self.number, code).how
            was_ready, wait = was_ready or is_ready, 1.0 if is_ready else wait
            if not was_ready:
                self.error = self._last_line.removeprefix("error: ") or how
                break
            self._say(f"replica {self.number} {how}; it is started again in {wait:.0f} s")
            self._is_stopping.wait(wait)
            wait = min(2 * wait, LONGEST_WAIT_SECONDS)
        self._settled.set()

    def _attempt(self) -> tuple[int, bool]:
        """Run the process to its end. Return its exit code, and whether it became ready to accept requests."""
        process = self._process = subprocess.Popen(
            self._command, env=dict(os.environ) | {REPLICA: "1"} | dict(self._environment), text=True, errors="replace",
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, process_group=0,
        )  # fmt: skip
        if self._is_stopping.is_set():
            process.send_signal(signal.SIGTERM)
        reader = threading.Thread(target=self._read, args=(process,), daemon=True)
        reader.start()
        assert process.stdout is not None
        is_ready = False
        for line in process.stdout:
            if line.startswith("ready on "):
                self.starts += 1
                self.url, is_ready = line.split()[-1], True
                self._settled.set()
                self._watch(process)
        code = process.wait()
        reader.join(1.0)
        for pipe in (process.stdin, process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()
        return code, is_ready

    def _watch(self, process: subprocess.Popen[str]) -> None:
        """Poll a replica until it ends. Kill it if it has not answered for `SILENT_SECONDS`."""
        heard = time.monotonic()
        with httpx.Client(trust_env=False, timeout=ASK_SECONDS) as client:
            while process.poll() is None:
                with contextlib.suppress(httpx.HTTPError):
                    client.get(f"{self.url}/health")
                    heard = time.monotonic()
                if time.monotonic() - heard > SILENT_SECONDS:
                    self._say(f"replica {self.number} has not answered for {SILENT_SECONDS:.0f} s")
                    process.kill()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(ASK_SECONDS)
        self.url = None

    def _read(self, process: subprocess.Popen[str]) -> None:
        """Pass the lines of the replica's stderr to `say`; an error before it is ready is stored in `error` instead."""
        assert process.stderr is not None
        for line in process.stderr:
            self._last_line = line.rstrip()
            if self._last_line and (self.starts or not line.startswith("error: ")):
                self._say(f"replica {self.number}: {self._last_line}")


class Replicas:
    """Several replicas, started together.

    Args:
        words: arguments of `meshwright`: a `serve` command.
        environments: additional environment variables of each replica.
        say: called, in threads, with lines for the user.
    """

    def __init__(
        self, words: Sequence[str], environments: Sequence[Mapping[str, str]], say: Callable[[str], None]
    ) -> None:
        self.all = [Replica(number, words, more, say) for number, more in enumerate(environments)]

    def wait(self) -> None:
        """Wait until all replicas accept requests.

        Raises:
            MeshwrightError: a replica failed to start.
        """
        for replica in self.all:
            replica.wait()
            if replica.error is not None:
                raise MeshwrightError(f"replica {replica.number}: {replica.error}")

    def stop(self, grace_seconds: float) -> None:
        """Tell all replicas to answer their accepted requests and end; kill those that need too long.

        grace_seconds: the grace period of the replicas, after which they end by themselves.
        """
        for replica in self.all:
            replica.stop()
        until = time.monotonic() + grace_seconds + END_SECONDS
        for replica in self.all:
            replica.end(max(0.1, until - time.monotonic()))
