"""Supervise a job of several processes on this machine: if a process is lost, name it and restart the job.

An attempt is one start of all processes, to their end. Their devices run one program, and only the last checkpoint has
the state of a lost process. So one lost process ends the attempt, and the next attempt resumes from the checkpoint.
"""

from __future__ import annotations

import contextlib
import queue
import random
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from meshwright.errors import MeshwrightError
from meshwright.execution.processes.host import FAILED, End, Host, listen
from meshwright.execution.processes.launch.children import Children, Exit, meshwright_command, state_of
from meshwright.support.signals import drop_terminals, find_terminals, handled_signals, not_ignored

FIRST_WAIT_SECONDS, LONGEST_WAIT_SECONDS = 1.0, 60.0
"""Wait before the first restart, and the longest wait. Each restart without a new checkpoint doubles the wait."""

STEADY_SECONDS = 600.0
"""In a job without checkpoints, an attempt that lasted this long resets the count of restarts."""

FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

INTERRUPTED = 130


@dataclass(frozen=True)
class Job:
    """A run of several processes, and the rules for restarting it."""

    # (number of processes, whether the run continues) -> the arguments of each process, without those of the
    # rendezvous. Raises MeshwrightError if the run cannot have that many processes.
    words: Callable[[int, bool], Sequence[str]]
    module: str  # The module that each process runs with these arguments, and after them those of the rendezvous.
    # The run directory, where a new checkpoint shows that a restart helped. None for a server, and for a script, whose
    # processes report it.
    directory: Path | None
    # Number of processes -> additional environment variables of each.
    environments: Callable[[int], Sequence[Mapping[str, str]]]
    num_processes: int  # At the start.
    least: int  # Minimum number of processes after losses.
    # Maximum number of restarts in a row without a new checkpoint; for a server, after attempts of less than
    # `STEADY_SECONDS`.
    restarts: int
    start_seconds: float  # Longest time that processes wait for each other at the start.
    stuck_seconds: float  # Longest time without a step of any process, after the first step.


def supervise(job: Job, say: Callable[[str], None]) -> int:
    """Run a job to its end, with restarts. Return the exit code of process 0, or of the failure that ended the job.

    SIGINT, SIGTERM and SIGHUP are passed on to all processes, which finish their step, save and end.

    say: called, also from threads, with lines for the user.
    """
    number, used, directory = job.num_processes, 0, job.directory
    before = checkpoints_in(directory)
    words = job.words(number, False)
    received: list[int] = []
    terminals = find_terminals()

    def receive(signal_number: int, _: object) -> None:
        if signal_number == signal.SIGHUP:
            drop_terminals(terminals)
        received.append(signal_number)

    # SIGTSTP (Ctrl-Z) is not forwarded: it stops only this process.
    with handled_signals(not_ignored(FORWARDED), receive):
        while True:
            began = time.monotonic()
            end, code, reported = _attempt(job, number, words, received, say)
            if end is None:
                return code
            if end.kind in ("refused", "failed"):
                say(f"error: {end.line}")
                return end.code
            directory = job.directory or reported or directory
            found = checkpoints_in(directory)
            is_of_use = found != before or (directory is None and time.monotonic() - began > STEADY_SECONDS)
            used, before = (1 if is_of_use else used + 1), found
            if used > job.restarts:
                brought = "brought no new checkpoint" if directory else f"did not last {STEADY_SECONDS:.0f} s"
                no_use = f"; {job.restarts} restarts in a row {brought}" if job.restarts else ""
                say(f"error: {end.line}{no_use}")
                return FAILED
            say(f"launch: {end.line}; all processes are ended")
            number, words = _next(job, number, max(1, len(end.numbers)))
            wait = min(FIRST_WAIT_SECONDS * 2 ** (used - 1), LONGEST_WAIT_SECONDS)
            goes_on = f"{number} processes continue" if number > 1 else "1 process continues"
            if directory is not None:
                goes_on += (
                    f" from checkpoint {max(found)}" if found else " from the start, as there is no checkpoint yet"
                )
            say(f"launch: restart {used} of {job.restarts} in {wait:.0f} s: {goes_on}")
            until = time.monotonic() + wait
            while time.monotonic() < until:
                if received:
                    say("launch: stopped" + ("; the same command with --resume continues" if job.directory else ""))
                    return INTERRUPTED if set(received) == {signal.SIGINT} else 0
                time.sleep(0.05)


def _next(job: Job, number: int, num_lost: int) -> tuple[int, Sequence[str]]:
    """Return (number of processes to continue with, their arguments).

    The number is the largest, from `number` - `num_lost` down to `job.least`, with which the run can continue; if there
    is none, it is `number`.

    Args:
        number: number of processes before.
        num_lost: how many of them were lost.
    """
    for fewer in range(number - num_lost, job.least - 1, -1):
        with contextlib.suppress(MeshwrightError):
            return fewer, job.words(fewer, True)
    return number, job.words(number, True)


def _attempt(
    job: Job, number: int, words: Sequence[str], received: list[int], say: Callable[[str], None]
) -> tuple[End | None, int, Path | None]:
    """Run all processes to their end.

    Args:
        number: number of processes.
        words: arguments of each process, without those of the rendezvous.
        received: the signals received so far, to which a handler adds later ones.
        say: called with lines for the user.

    Returns:
        The reason why the attempt had to be ended, or None if all processes ended normally; the exit code of process
        0, or another's if that is 0; and the run directory that the processes reported, if any.
    """
    port, ends = free_ports(), queue.Queue[End]()
    host = Host(
        listen("127.0.0.1", port), number, job.start_seconds, ends.put,
        on_note=lambda line: say(f"launch: {line}"), stuck_seconds=job.stuck_seconds,
    )  # fmt: skip
    meet = ["--coordinator", f"127.0.0.1:{port}", "--num-processes", str(number)]
    meet += ["--start-seconds", f"{job.start_seconds:g}"]
    commands = [meshwright_command([*words, *meet, "--process-id", str(one)], job.module) for one in range(number)]
    children = Children(commands, job.environments(number), say)
    num_sent = 0
    host.on_joined = children.show
    host.start()
    try:
        while not children.have_ended:
            for signal_number in received[num_sent:]:
                children.send(signal_number)
                num_sent += 1
            exits = [one for one in children.exits() if one.code]
            end = _take(ends, 0.1)
            if (exits or end) and not received:
                # If a process ended, wait for the host to get the reason that it reported. If the host lost a process,
                # wait for the end of that process.
                if end is None:
                    end = _take(ends, 1.0)
                elif end.kind == "lost":
                    time.sleep(0.5)
                    exits += [one for one in children.exits() if one.number in end.numbers]
                return _cause(exits, end, host, children), FAILED, host.directory
        return None, children.codes[0] or max(children.codes.values()), host.directory
    finally:
        children.mute()
        host.stop()
        children.end()
        if sys.stdout.isatty():
            sys.stdout.write("\x1b[?25h")  # Show the cursor, which a killed progress bar has hidden.
            sys.stdout.flush()


def _cause(exits: Sequence[Exit], end: End | None, host: Host, children: Children) -> End:
    """Return why an attempt must end.

    Args:
        exits: the processes that ended with an exit code other than 0.
        end: the reason that the host found; None if it found none.
    """
    if end is not None and end.kind in ("refused", "failed"):
        return end
    if exits:
        # A signal ends one process; exit codes of others may follow from that.
        one = min(exits, key=lambda one: (one.code > 0, one.number))
        step = host.step_of(one.number)
        line = f"process {one.number} (pid {children.pid(one.number)}) {one.how}"
        if one.code > 0 and not host.have_joined:  # Its stderr has the reason; the others fail in the same way.
            children.show(one.number)
            return End(line, one.code, "refused", (one.number,))
        line += " before its first step" if step is None else f" after step {step}"
        return End(line, FAILED, "lost", tuple(one.number for one in exits if one.code < 0) or (one.number,))
    assert end is not None
    state = state_of(children.pid(end.numbers[0])) if end.kind == "lost" else ""
    return replace(end, line=end.line + (f"; {state}" if state else ""))


def _take(ends: queue.Queue[End], seconds: float) -> End | None:
    with contextlib.suppress(queue.Empty):
        return ends.get(timeout=seconds)
    return None


def checkpoints_in(directory: Path | None) -> set[int]:
    """Return the steps of the checkpoints in a run directory; empty for None."""
    if directory is None:
        return set()
    folder = directory / "checkpoints"
    return {int(path.name) for path in folder.iterdir() if path.name.isdigit()} if folder.is_dir() else set()


PORTS = range(20_000, 32_000)
"""Ports to choose from, below the range that Linux uses for outgoing connections (32768 to 60999).

An outgoing connection could take a port of Linux's range between `free_ports` and the start of JAX's service on that
port, seconds later.
"""


def free_ports() -> int:
    """Return the first of two consecutive free ports of this machine."""
    while True:
        with socket.socket() as one, socket.socket() as other, contextlib.suppress(OSError):
            port = random.choice(PORTS)
            one.bind(("127.0.0.1", port))
            other.bind(("127.0.0.1", port + 1))
            return port
