"""What the three parts of `benchmarks/faults.py` share: a trial, its promises, and commands in processes of their own.

A command runs in a child that is forked after the imports: what it runs is `meshwright.cli.main`, as the installed
command does, without the three seconds in which Python imports JAX.
"""

from __future__ import annotations

import os
import random
import re
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

MOST_SECONDS = 300.0
"""How long a command may take, on cores that others use too, before a trial calls it hung."""


@dataclass
class Trial:
    """One trial: the numbers that it draws from its seed, what it did, and whether the promises it tried were kept."""

    part: str
    seed: int
    root: Path
    """The campaign's folder: what trials share."""
    rng: random.Random = field(init=False)
    did: list[str] = field(default_factory=list)
    tried: dict[str, int] = field(default_factory=dict)
    broke: list[tuple[str, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rng = random.Random(f"{self.part} {self.seed}")

    @property
    def folder(self) -> Path:
        """A folder of this trial alone."""
        folder = self.root / f"{self.part}-{self.seed}"
        folder.mkdir(exist_ok=True)
        return folder

    def do(self, what: str) -> None:
        """Note what the trial does next."""
        self.did.append(what)

    def hold(self, promise: str, is_kept: bool, why: object = "") -> bool:
        """Count a promise as tried, and as broken where it was not kept."""
        self.tried[promise] = self.tried.get(promise, 0) + 1
        if not is_kept:
            self.broke.append((promise, str(why)[-2000:]))
        return is_kept


class Command:
    """A `meshwright` command in a child process, its output in a file."""

    def __init__(self, words: Sequence[object], log: Path, before: Sequence[Callable[[], object]] = ()) -> None:
        self.words = [str(word) for word in words]
        self._log, self._from = log, log.stat().st_size if log.exists() else 0
        self.code: int | None = None
        log.touch()
        sys.stdout.flush()
        if (process := os.fork()) == 0:
            _run_in_child(self.words, log, before)
        self.pid = process

    def is_running(self) -> bool:
        """Whether the process has not ended."""
        if self.code is None:
            ended, status = os.waitpid(self.pid, os.WNOHANG)
            self.code = os.waitstatus_to_exitcode(status) if ended else None
        return self.code is None

    def wait(self, seconds: float = MOST_SECONDS) -> int | None:
        """Return the exit code; None, and the process killed, if it did not end in time."""
        until = time.monotonic() + seconds
        while self.is_running():
            if time.monotonic() > until:
                self.signal(signal.SIGKILL)
                os.waitpid(self.pid, 0)
                return None
            time.sleep(0.005)
        return self.code

    def wait_for(self, what: Callable[[], bool], seconds: float = MOST_SECONDS) -> bool:
        """Wait until something is true; False if the process ended, or the time is over, before."""
        until = time.monotonic() + seconds
        while not what():
            if not self.is_running() or time.monotonic() > until:
                return what()
            time.sleep(0.001)
        return True

    def signal(self, number: int) -> None:
        """Send a signal, unless the process has ended."""
        if self.is_running():
            os.kill(self.pid, number)

    @property
    def text(self) -> str:
        """All that it has printed."""
        with self._log.open("rb") as file:
            file.seek(self._from)
            return file.read().decode(errors="replace")


def _run_in_child(words: list[str], log: Path, before: Sequence[Callable[[], object]]) -> None:
    code = 70
    try:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        for act in before:
            act()
        from meshwright.cli.main import main

        code = main(words)
    except BaseException:  # As Python does at the end of a program.
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


_UNEXPECTED = re.compile(r"Traceback \(most recent|^Fatal Python error|^[A-Za-z_.]*Error: ", re.MULTILINE)


def is_plain(text: str) -> bool:
    """Whether a command printed no traceback."""
    return not _UNEXPECTED.search(text)


def error_lines(text: str) -> list[str]:
    """The error lines that a command printed; a terminal's bar is no line."""
    return [line for line in text.replace("\r", "\n").splitlines() if line.startswith("error: ")]


def damage(rng: random.Random, path: Path, hows: Sequence[str] = ("flip", "cut", "remove")) -> str:
    """Flip a bit of a file, cut it, or remove it; what was done."""
    how, data = rng.choice(hows), bytearray(path.read_bytes())
    if how == "remove" or not data:
        path.unlink()
        return f"removed {path.name}"
    at = rng.randrange(len(data))
    if how == "cut":
        path.write_bytes(data[:at])
        return f"cut {path.name} at {at}"
    bit = rng.randrange(8)
    data[at] ^= 1 << bit
    path.write_bytes(data)
    return f"flipped bit {bit} of byte {at} of {path.name}"
