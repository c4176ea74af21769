"""Rendezvous of a run's processes: they join, their settings are compared, then each sends a heartbeat every second.

The host is a thread of process 0, or of `meshwright launch` for the processes it started. Only the host decides that a
run must end, and which process reports the reason, in one line. The others end without a message.

`jax.distributed` (JAX 0.10.2) is not enough. If a process dies, it aborts the others with a page of C++ output; if this
is process 0, even with `jax_enable_recoverability`. A Python callback for lost processes (`missed_heartbeat_callback`)
ends in std::bad_cast. `jax.distributed` does not name a process that never joins, nor one that is alive but takes no
steps.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from meshwright.errors import MeshwrightError
from meshwright.execution.processes.compare import find_difference
from meshwright.execution.processes.messages import BEAT_SECONDS, PAUSE_SECONDS, SILENT_SECONDS, Inbox, send

BEHIND_SECONDS = 20.0
"""If no process takes a step for this many seconds, those that took fewer steps than others are named.

A server ends then: its processes only dispatch steps, which takes milliseconds whatever the steps' duration, so a
process with fewer steps hangs. In training, a process may still be running the step, or writing a file.
"""

FAILURE_SECONDS = 2.0
"""Seconds to wait for process 0 to report the same failure, before another process's failure is reported."""

REFUSED, FAILED = 2, 1
"""Exit codes: REFUSED for wrong input, FAILED for a run that could not continue."""


@dataclass(frozen=True)
class End:
    """Why a run must end.

    Args:
        line: the reason, for the user.
        code: the exit code of the processes.
        kind: refused (before the start), failed (a process reported why it cannot continue), lost (a process died or is
            silent), stuck (no process takes a step).
    """

    line: str
    code: int
    kind: Literal["refused", "failed", "lost", "stuck"]
    numbers: tuple[int, ...] = ()
    """The numbers of the processes that caused it; empty if unknown."""


@dataclass
class _Peer:
    """A process that has joined."""

    connection: socket.socket
    where: str  # Its machine and process id, for the user.
    facts: dict[str, Any]  # Its settings, by path.
    inbox: Inbox
    heard: float  # When its last message arrived, on the clock `time.monotonic`.
    step: int | None = None
    """Steps taken; None while there are no steps to take, for example before the first."""
    at: str = ""
    """The line of meshwright's sources that its main thread is in."""
    is_idle: bool | None = None
    """See `Member.is_idle`."""
    is_done: bool = False
    """Whether it reported its normal end."""
    failure: tuple[str, int] | None = None
    """The error message and exit code that it reported; None for no failure."""


@dataclass
class Host:
    """Rendezvous of `count` processes; `start` opens it in its own thread.

    Args:
        listener: socket that the processes connect to.
        count: number of processes.
        start_seconds: how long to wait until all processes have joined.
        on_end: called once, in the host's thread, with the reason why the run must end, after the processes were told
          to end.
        on_note: called with lines for the user.
        on_joined: called when all processes have joined with equal settings.
        stuck_seconds: the longest time without a step of any process, after the first step; None for no limit.
    """

    listener: socket.socket
    count: int
    start_seconds: float
    on_end: Callable[[End], None]
    on_note: Callable[[str], None]
    on_joined: Callable[[], None] = lambda: None
    stuck_seconds: float | None = None
    directory: Path | None = None
    """The run directory of a script, once a process has reported it."""
    _peers: dict[int, _Peer] = field(default_factory=dict)
    _pending: dict[socket.socket, Inbox] = field(default_factory=dict)
    _have_joined: bool = False
    _is_over: bool = False
    _last_step_at: float = 0.0
    """When any process took its last step, on the clock `time.monotonic`."""
    _named: tuple[int, ...] = ()
    """The processes that the last note named because they took fewer steps than others."""

    def start(self) -> None:
        """Open the rendezvous: accept connections in a thread."""
        self._selector = selectors.DefaultSelector()
        self._selector.register(self.listener, selectors.EVENT_READ)
        self._opened = time.monotonic()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Wait until all processes have reported their normal end. If one is lost meanwhile, `on_end` is called."""
        self._thread.join()

    @property
    def have_joined(self) -> bool:
        """Whether all processes have joined with equal settings."""
        return self._have_joined

    def step_of(self, number: int) -> int | None:
        """Return the number of steps that a process has taken; None if it has not joined, or takes no steps."""
        return self._peers[number].step if number in self._peers else None

    def stop(self) -> None:
        """End the rendezvous, and tell all processes in it to end. `on_end` is not called."""
        self._is_over = True
        for peer in self._peers.values():
            with contextlib.suppress(OSError):
                send(peer.connection, {"end": REFUSED})

    def _run(self) -> None:
        last = beat = time.monotonic()
        while not self._is_over and not (self._have_joined and all(peer.is_done for peer in self._peers.values())):
            ready = self._selector.select(0.2)
            now = time.monotonic()
            if now - last > PAUSE_SECONDS:
                self._last_step_at = now
                for peer in self._peers.values():
                    peer.heard = now
            last = now
            for key, _ in ready:
                if key.fileobj is self.listener:
                    with contextlib.suppress(OSError):
                        connection = self.listener.accept()[0]
                        connection.settimeout(5.0)
                        self._pending[connection] = Inbox()
                        self._selector.register(connection, selectors.EVENT_READ)
                else:
                    self._receive(key.fileobj, now)  # pyright: ignore[reportArgumentType]
            if now - beat >= BEAT_SECONDS:
                beat = now
                self._broadcast({"beat": True})
            (self._watch if self._have_joined else self._check_start)(now)
        self.listener.close()

    def _receive(self, connection: socket.socket, now: float) -> None:
        """Read and handle messages from a connection."""
        number = next((number for number, peer in self._peers.items() if peer.connection is connection), None)
        inbox = self._pending[connection] if number is None else self._peers[number].inbox
        try:
            received = connection.recv(1 << 16)
            messages = list(inbox.add(received))
        except (OSError, ValueError):
            received, messages = b"", []
        for message in messages:
            if number is None:
                number = self._join(connection, message, now)
            else:
                self._handle(self._peers[number], message, now)
            if self._is_over or number is None:
                return
        if not received:
            self._selector.unregister(connection)
            connection.close()
            self._pending.pop(connection, None)
            if number is not None and not self._peers[number].is_done and self._peers[number].failure is None:
                self._mark_lost(number, "has died")

    def _join(self, connection: socket.socket, message: dict[str, Any], now: float) -> int | None:
        """Add a process from the first message of its connection. Return its number; None for an invalid message."""
        try:
            number, count, where, facts = (message[name] for name in ("process", "of", "where", "facts"))
            taken = _Peer(connection, str(where), dict(facts), self._pending[connection], now)
        except (KeyError, TypeError, ValueError):
            return None
        if number in self._peers:
            other = self._peers[number].where
            with contextlib.suppress(OSError):
                send(connection, {"end": REFUSED})
            self._end(End(f"two processes are --process-id {number}: {other} and {taken.where}", REFUSED, "refused"))
            return None
        self._pending.pop(connection)
        self._peers[number] = taken
        if count != self.count:
            line = f"process {number} ({taken.where}) was started with --num-processes {count}, and another with"
            self._end(End(f"{line} {self.count}", REFUSED, "refused", (number,)))
        return number

    def _check_start(self, now: float) -> None:
        """Tell the processes to go on if all have joined with equal settings; else end the run if it cannot start.

        It cannot start if settings differ, a process failed, or one has not joined within `start_seconds`. now: the
        time on the clock `time.monotonic`.
        """
        if len(self._peers) == self.count:
            if difference := find_difference({number: peer.facts for number, peer in self._peers.items()}):
                self._end(End(difference, REFUSED, "refused"))
                return
            self._have_joined, self._last_step_at = True, now
            for peer in self._peers.values():
                peer.heard = now
            self._broadcast({"go": True})
            self.on_joined()
        elif now - self._opened > self.start_seconds:
            missing = [number for number in range(self.count) if number not in self._peers]
            first = ", ".join(map(str, missing[:10])) + (f" and {len(missing) - 10} more" if missing[10:] else "")
            which = f"process{'es' if missing[1:] else ''} {first} of {self.count}"
            line = f"{which} did not come within {self.start_seconds:g} s; start all, with the same --coordinator"
            self._end(End(line, FAILED, "refused", tuple(missing)))  # Clusters do not restart after REFUSED.
        else:
            self._check_failures(now)

    def _handle(self, peer: _Peer, message: dict[str, Any], now: float) -> None:
        """Handle a message of a process that has joined."""
        if peer.failure is not None:
            return
        peer.heard = now
        if "beat" in message:
            step = message["beat"]
            if step != peer.step:
                self._last_step_at, self._named = now, ()
            peer.step, peer.at, peer.is_idle = step, message.get("at", ""), message.get("idle")
            if "directory" in message:
                self.directory = Path(message["directory"])
        elif "done" in message:
            peer.is_done = True
        elif "failed" in message:
            peer.failure = (str(message["failed"]), int(message["code"]))

    def _watch(self, now: float) -> None:
        """After the start: end the run if a process is silent, has failed, or takes no step."""
        for number, peer in self._peers.items():
            if not peer.is_done and peer.failure is None and now - peer.heard > SILENT_SECONDS:
                self._mark_lost(number, f"has not answered for {now - peer.heard:.0f} s")
                return
        if self._check_failures(now):
            return
        steps = {number: peer.step for number, peer in self._peers.items() if not peer.is_done}
        # Some processes are at their normal end, or have not taken the first step: compiling has no time limit.
        if len(steps) < self.count or None in steps.values():
            return
        behind = tuple(number for number in steps if steps[number] != max(steps.values()))  # pyright: ignore
        is_idle = self._peers[0].is_idle
        if is_idle and not behind:
            self._last_step_at, self._named = now, ()
        waited = now - self._last_step_at
        if behind and behind != self._named and waited > BEHIND_SECONDS:
            self._named = behind
            line = f"{self._describe(behind)}; the others have waited {waited:.0f} s for it"
            if is_idle is not None:
                self._end(End(line, FAILED, "stuck", behind))
                return
            self.on_note(line)
        if self.stuck_seconds is not None and waited > self.stuck_seconds:
            # If all took the same number of steps, suspect the processes at another line of code than most.
            places = [peer.at for peer in self._peers.values()]
            suspects = behind or tuple(n for n, peer in self._peers.items() if places.count(peer.at) * 2 < len(places))
            what = self._describe(suspects or tuple(steps))
            self._end(End(f"no step was taken for {waited:.0f} s: {what}", FAILED, "stuck", suspects))

    def _describe(self, numbers: tuple[int, ...]) -> str:
        """Return a text with the step and source line of some processes."""
        return ", ".join(
            f"process {number} ({self._peers[number].where}) is at step {self._peers[number].step}"
            + (f", in {self._peers[number].at}" if self._peers[number].at else "")
            for number in numbers
        )

    def _check_failures(self, now: float) -> bool:
        """End the run if a process reported a failure; return whether it ended.

        If all processes fail, only the failure of process 0 is reported.
        """
        failed = {number: peer for number, peer in self._peers.items() if peer.failure is not None}
        if not failed:
            return False
        first = min(failed)
        if first and 0 in self._peers and now - failed[first].heard < FAILURE_SECONDS:
            return False
        line, code = failed[first].failure or ("", FAILED)
        self._end(End(line if first == 0 else f"process {first}: {line}", code, "failed", tuple(failed)))
        return True

    def _mark_lost(self, number: int, how: str) -> None:
        """End the run because a process is gone. how: what happened to it, to print after its number."""
        peer = self._peers[number]
        step = "" if peer.step is None else f" after step {peer.step}"
        kind = "lost" if self._have_joined else "refused"
        self._end(End(f"process {number} ({peer.where}) {how}{step}", FAILED, kind, (number,)))

    def _end(self, end: End) -> None:
        """Tell all processes to end, and call `on_end`; once only."""
        if self._is_over:
            return
        self._is_over = True
        self._broadcast({"end": end.code})
        self.on_end(end)

    def _broadcast(self, message: dict[str, Any]) -> None:
        for peer in self._peers.values():
            with contextlib.suppress(OSError):
                send(peer.connection, message)


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens on a port of this machine, on loopback alone if `host` is localhost.

    JAX's service uses the next port, so the next port must be free too.

    Raises:
        MeshwrightError: the port or the next one is in use.
    """
    near = host in ("localhost", "127.0.0.1")
    family = socket.AF_INET6 if not near and socket.has_dualstack_ipv6() else socket.AF_INET
    address = "127.0.0.1" if near else ""
    found = None
    for wanted in (port + 1, port):
        try:
            found = socket.create_server(
                (address, wanted), family=family, dualstack_ipv6=family == socket.AF_INET6, backlog=1024
            )
        except OSError as error:
            raise MeshwrightError(
                f"cannot listen on port {wanted} of this machine: {os.strerror(error.errno or 0).lower()}; two ports"
                f" are needed, {port} and {port + 1}: give --coordinator others"
            ) from None
        if wanted != port:
            found.close()
    assert found is not None
    return found
