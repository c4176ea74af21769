"""The processes of one attempt of a job: start them, read their output, send them signals, and end them."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import IO

from meshwright.execution.processes.options import HOSTED

END_SECONDS = 5.0
"""Seconds that a process may take to end after it was told to end; then it is killed."""

SHOWN_LINES = 200
"""Maximum lines shown of each process other than the first, so that one process does not hide the others."""


@dataclass(frozen=True)
class Exit:
    """How a process ended."""

    number: int
    """The number of the process."""
    code: int
    """The exit code; if a signal ended the process, minus its number."""

    @property
    def how(self) -> str:
        """A description to print after `process 2`."""
        if self.code < 0:
            return f"was ended by {_signal_name(-self.code)}"
        return f"ended with exit code {self.code}"


class Children:
    """The processes of one attempt, numbered from 0.

    Process 0 inherits this process's output, so its progress bar appears as usual. Lines of the others are passed to
    `say` with the process number. Until all have joined the rendezvous, these lines are held back, because after a
    wrong command all processes print the same lines. Each process has its own process group: signals of a terminal
    reach only this process, which forwards them.

    Args:
        commands: words of each process's command, the program first.
        environments: additional environment variables of each process.
        say: called, in threads, with each line of the other processes.
    """

    def __init__(
        self, commands: Sequence[Sequence[str]], environments: Sequence[Mapping[str, str]], say: Callable[[str], None]
    ) -> None:
        self._say = say
        self._is_muted = False
        self._held: dict[int, list[str]] | None = {}
        self._showing = threading.Lock()
        self._ended: dict[int, int] = {}
        self._processes: list[subprocess.Popen[bytes]] = []
        self._readers: list[threading.Thread] = []
        try:
            for number, (command, more) in enumerate(zip(commands, environments, strict=True)):
                out, err = (None, None) if number == 0 else (subprocess.PIPE, subprocess.STDOUT)
                process = subprocess.Popen(
                    command, env=dict(os.environ) | {HOSTED: "1"} | dict(more), stdin=subprocess.DEVNULL,
                    stdout=out, stderr=err, process_group=0,
                )  # fmt: skip
                self._processes.append(process)
                if process.stdout is not None:
                    reader = threading.Thread(target=self._read, args=(number, process.stdout), daemon=True)
                    reader.start()
                    self._readers.append(reader)
        except BaseException:
            self.kill()
            raise

    def pid(self, number: int) -> int:
        """Return the process id of process `number`."""
        return self._processes[number].pid

    def exits(self) -> list[Exit]:
        """Return the processes that have ended since the last call."""
        found = []
        for number, process in enumerate(self._processes):
            if number not in self._ended and (code := process.poll()) is not None:
                self._ended[number] = code
                found.append(Exit(number, code))
        return found

    @property
    def codes(self) -> dict[int, int]:
        """The exit codes of processes whose end `exits` has returned, by process number."""
        return dict(self._ended)

    @property
    def have_ended(self) -> bool:
        """Whether `exits` has returned the end of all processes."""
        return len(self._ended) == len(self._processes)

    def send(self, number: int) -> None:
        """Send signal `number` to all running processes."""
        for process in self._processes:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, number)

    def show(self, number: int | None = None) -> None:
        """Show the lines held back, of process `number` or of all (None), and all later lines as they come."""
        with self._showing:
            held, self._held = self._held or {}, None
            for one, lines in held.items():
                if number in (None, one):
                    for line in lines:
                        self._say(line)

    def mute(self) -> None:
        """Stop showing lines: if processes that still run fail, it is a consequence of the first failure."""
        self._is_muted = True

    def end(self) -> None:
        """Wait `END_SECONDS` for all processes, which the host of the rendezvous told to end; then kill the rest."""
        until = time.monotonic() + END_SECONDS
        while time.monotonic() < until and any(process.poll() is None for process in self._processes):
            time.sleep(0.05)
        self.kill()

    def kill(self) -> None:
        """Kill all running processes, including stopped ones, and wait for them."""
        self.send(signal.SIGKILL)
        for process in self._processes:
            process.wait()
        for reader in self._readers:
            reader.join(1.0)

    def _read(self, number: int, pipe: IO[bytes]) -> None:
        num_shown = 0
        for line in pipe:
            text = line.decode(errors="replace").rstrip()
            # Gloo (collectives of XLA:CPU) prints a line to stdout for each group of processes.
            if not text or text.startswith("[Gloo] Rank"):
                continue
            num_shown += 1
            text = text if num_shown <= SHOWN_LINES else f"… (no more than {SHOWN_LINES} lines are shown)"
            with self._showing:
                if self._is_muted or num_shown > SHOWN_LINES + 1:
                    continue
                if self._held is None:
                    self._say(f"process {number}: {text}")
                else:
                    self._held.setdefault(number, []).append(f"process {number}: {text}")


def state_of(pid: int) -> str:
    """Return why a process does not answer, from its state in Linux, as text; '' if its state is not the reason."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            state = file.read().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""
    return {"T": "it is stopped (SIGSTOP)", "D": "it waits for a disk or a device"}.get(state, "")


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def meshwright_command(words: Sequence[str], module: str = "meshwright") -> list[str]:
    """Return the words of a command that runs `module` with arguments `words`, in this Python."""
    return [sys.executable, "-m", module, *words]
