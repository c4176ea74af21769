"""Show on stderr that a command is still running."""

from __future__ import annotations

import shutil
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

FIRST, AGAIN = 0.5, 0.5
"""Seconds until a terminal shows something, and between updates."""

EACH_LINE = 25.0
"""Seconds between lines if stderr is not a terminal."""


@contextmanager
def waiting(what: str) -> Iterator[None]:
    """Print what the command waits for and for how long: a transient line on a terminal, else a line now and then.

    Nothing is printed for waits below half a second.
    """
    done = threading.Event()
    thread = threading.Thread(target=_say, args=(what, done), daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _say(what: str, done: threading.Event) -> None:
    """Print until `done` is set."""
    out, began = sys.stderr, time.monotonic()
    is_terminal = out.isatty()
    wait = FIRST if is_terminal else EACH_LINE
    try:
        while not done.wait(wait):
            seconds = f"{time.monotonic() - began:.0f} s"
            if is_terminal:
                room = shutil.get_terminal_size().columns - len(seconds) - 3
                print(f"\r{what[:room]}: {seconds}", end="", file=out, flush=True)
            else:
                print(f"{what}: {seconds} so far", file=out, flush=True)
            wait = AGAIN if is_terminal else EACH_LINE
        if is_terminal and wait == AGAIN:
            print("\r\x1b[K", end="", file=out, flush=True)
    except (OSError, ValueError):
        pass  # Nobody reads stderr.
