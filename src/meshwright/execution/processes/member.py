"""This process in the rendezvous (`host`): it reports every second that it is alive, and the number of steps taken.

It ends, with one line or silently, when the host of the rendezvous tells it to end or is gone. Without this it would
wait for the devices of a lost process until a runtime's timeout, or forever.
"""

from __future__ import annotations

import contextlib
import os
import platform
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import meshwright
from meshwright.errors import MeshwrightError, TemporaryError
from meshwright.execution.processes.compare import flatten
from meshwright.execution.processes.host import FAILED, REFUSED, End, Host, listen
from meshwright.execution.processes.messages import BEAT_SECONDS, PAUSE_SECONDS, SILENT_SECONDS, Inbox, send
from meshwright.execution.processes.options import HOSTED, Processes, split_address

SOURCES = str(Path(meshwright.__file__).parent)

of_script: Member | None = None
"""The connection of this process if `meshwright launch` started a script in it; set before the script runs."""


class Member:
    """The connection of this process to the rendezvous, made by `join`.

    Attributes:
        number: number of this process.
        host: host name of process 0.
        before_end: called, in a thread, before the host ends this process; it restores the terminal.
        step: number of steps taken so far; None while there are no steps to take, for example before the first.
        is_idle: for process 0 of a server, returns whether there is no step to take now; None for a training run, which
            always has a next step.
        directory: the run directory, to be reported to the host; only a script has to set it.
    """

    def __init__(
        self, connection: socket.socket, number: int, address: str, *, is_hosted: bool, host: Host | None
    ) -> None:
        self.number = number
        self.host = split_address(address)[0]
        self.before_end: Callable[[], None] = lambda: None
        self.step: int | None = None
        self.is_idle: Callable[[], bool] | None = None
        self.directory: Path | None = None
        self._connection, self._address, self._is_hosted, self._host = connection, address, is_hosted, host
        self._inbox, self._sending = Inbox(), threading.Lock()
        self._has_left = False
        self._ending = threading.Lock()

    def wait(self) -> None:
        """Wait until all processes have joined with equal settings; then send heartbeats until this one leaves.

        Raises:
            TemporaryError: process 0 has not answered for `SILENT_SECONDS`.
        """
        heard = time.monotonic()
        while True:
            messages = self._received()
            if end := next((message["end"] for message in messages if "end" in message), 0):
                if self._host is not None:
                    time.sleep(60.0)  # Its thread reports why this process ends, and ends it.
                leave_at_once(end)
            if any("go" in message for message in messages):
                threading.Thread(target=self._beat, daemon=True).start()
                threading.Thread(target=self._listen, daemon=True).start()
                return
            heard = time.monotonic() if messages else heard
            if time.monotonic() - heard > SILENT_SECONDS:
                raise TemporaryError(f"process 0 at {self._address} has not answered for {SILENT_SECONDS:.0f} s")

    def leave(self) -> None:
        """Report the normal end of this process. If the host is in this process, wait for the other processes."""
        self._has_left = True
        self._say({"done": True})
        if self._host is not None:
            self._host.wait()

    def fail(self, line: str, code: int) -> NoReturn:
        """End this process and the run because this process failed. The host reports one failure for all processes.

        Skips the normal exit, in which JAX would wait for the other processes. line: the error, for the user. code: the
        exit code.
        """
        self._say({"failed": line, "code": code})
        time.sleep(10.0)  # The host answers, and `_listen` ends the process.
        if self._ending.acquire(blocking=False):
            print(f"error: {line}", file=sys.stderr, flush=True)
            leave_at_once(code)
        time.sleep(60.0)
        leave_at_once(code)

    def crash(self) -> NoReturn:
        """End this process because of the unexpected exception that is being handled.

        If another process is lost, a collective may raise such an exception. So this first waits until the host would
        have detected and reported the lost process, and ended this one.
        """
        time.sleep(SILENT_SECONDS + 5.0)
        traceback.print_exc()
        self.fail(traceback.format_exc().splitlines()[-1], FAILED)

    def _received(self) -> list[dict[str, Any]]:
        """Wait up to a second for messages, and return them. Raises a `TemporaryError` if the host is gone."""
        try:
            received = self._connection.recv(1 << 16)
        except TimeoutError:
            return []
        except OSError:
            received = b""
        if not received:
            host = "meshwright launch" if self._is_hosted else f"process 0 at {self._address}"
            raise TemporaryError(f"{host} is gone; process {self.number} ends")
        return list(self._inbox.add(received))

    def _listen(self) -> None:
        """Until this process leaves: end it when the host tells it to end, is silent or is gone."""
        heard = last = time.monotonic()
        while not self._has_left:
            line, code = "", FAILED
            try:
                messages = self._received()
            except MeshwrightError as error:
                messages, line = [], str(error)
            now = time.monotonic()
            if messages or now - last > PAUSE_SECONDS:
                heard = now
            last = now
            if now - heard > SILENT_SECONDS:
                line = f"process 0 at {self._address} has not answered for {now - heard:.0f} s; the run ends"
            end = next((message["end"] for message in messages if "end" in message), None)
            # The process is ended from here, outside its main thread, which may hang in a collective.
            if (line or end is not None) and not self._has_left and self._ending.acquire(blocking=False):
                if self._host is not None:
                    time.sleep(60.0)  # Its thread reports why this process ends, and ends it.
                self.before_end()
                if line and not self._is_hosted:
                    print(f"error: {line}", file=sys.stderr, flush=True)
                leave_at_once(code if end is None else end)

    def _beat(self) -> None:
        while not self._has_left:
            more: dict[str, Any] = {} if self.is_idle is None else {"idle": self.is_idle()}
            if self.directory is not None:
                more["directory"] = str(self.directory.absolute())
            self._say({"beat": self.step, "at": _source_line()} | more)
            time.sleep(BEAT_SECONDS)

    def _say(self, message: dict[str, Any]) -> None:
        with self._sending, contextlib.suppress(OSError):
            send(self._connection, message)


def leave_at_once(code: int) -> NoReturn:
    """End the process without the normal exit of Python and JAX, which would wait for processes that are gone."""
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def join(processes: Processes, facts: Mapping[str, Any]) -> Member:
    """Join the other processes of a run. Return when all have joined with equal settings.

    Process 0 hosts the rendezvous, unless `meshwright launch` does. Errors that the host finds end this process, with
    exit code 2 if they are in the arguments, after process 0 or `launch` has reported them.

    Args:
        processes: this process and the others, with an address as coordinator.
        facts: settings that must be equal in all processes, such as the config of a run; versions are added here.

    Raises:
        TemporaryError: the host cannot be reached.
    """
    assert processes.coordinator is not None
    assert processes.num_processes is not None
    assert processes.process_id is not None
    host, port = split_address(processes.coordinator)
    number, is_hosted = processes.process_id, HOSTED in os.environ
    member: Member | None = None

    def end(why: End) -> None:
        """Report why the run ends, and end this process; called in the host's thread."""
        if member is not None:
            member.before_end()
        print(f"error: {why.line}", file=sys.stderr, flush=True)
        time.sleep(0.2)  # The other processes read in this time that they must end.
        leave_at_once(why.code)

    hosted_here = None
    if number == 0 and not is_hosted:
        hosted_here = Host(
            listen(host, port), processes.num_processes, processes.start_seconds, end,
            on_note=lambda line: print(f"note: {line}", file=sys.stderr, flush=True),
        )  # fmt: skip
        hosted_here.start()
    connection = _connect(host, port, processes)
    member = Member(connection, number, processes.coordinator, is_hosted=is_hosted, host=hosted_here)
    versions = {name: version(name) for name in ("meshwright", "jax", "jaxlib")}
    versions["python"] = ".".join(platform.python_version_tuple()[:2])
    where = f"{socket.gethostname()}, pid {os.getpid()}"
    hello = {"process": number, "of": processes.num_processes, "where": where}
    member._say(hello | {"facts": {f"version of {name}": found for name, found in versions.items()} | flatten(facts)})
    member.wait()
    return member


def _connect(host: str, port: int, processes: Processes) -> socket.socket:
    """Connect to the host of the rendezvous; retry for the `start_seconds` of `processes`."""
    until = time.monotonic() + processes.start_seconds
    while True:
        try:
            connection = socket.create_connection((host, port), timeout=min(5.0, processes.start_seconds))
        except OSError as error:
            if time.monotonic() > until:
                raise TemporaryError(
                    f"process {processes.process_id} did not reach process 0 at {processes.coordinator} within"
                    f" {processes.start_seconds:g} s ({(error.strerror or str(error)).lower()}); it must run, listen"
                    f" there, and be let through by firewalls"
                ) from None
            time.sleep(0.2)
            continue
        connection.settimeout(BEAT_SECONDS)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return connection


def _source_line() -> str:
    """Return the line of meshwright's sources that the main thread is in, such as `execution/training/loop.py:120`."""
    frame: FrameType | None = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None:
        if (name := frame.f_code.co_filename).startswith(SOURCES):
            return f"{name[len(SOURCES) + 1 :]}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


@contextlib.contextmanager
def report_end_to_others(member: Member | None, *failures: type[MeshwrightError]) -> Iterator[None]:
    """On exit from the context, report to the other processes how this one ends: normally, or by an exception.

    After an exception this process ends at once, without running later code. A KeyboardInterrupt is not reported:
    all processes get Ctrl-C.

    Args:
        member: the connection of this process; None for a single process.
        failures: errors that count as failures of a started run; other `MeshwrightError`s count as wrong input.
    """
    if member is None:
        yield
        return
    try:
        yield
    except MeshwrightError as error:
        member.fail(str(error), FAILED if isinstance(error, (TemporaryError, *failures)) else REFUSED)
    except Exception:  # Report it before its traceback is printed.
        member.crash()
    member.leave()
