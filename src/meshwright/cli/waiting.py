"""Show on stderr that a command is still running."""

from __future__ import annotations

import json
import shutil
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from meshwright.errors import MeshwrightError
from meshwright.support.files import user_cache, write_file
from meshwright.units import show_seconds

FIRST, AGAIN = 0.5, 0.5
"""Seconds until a terminal shows something, and between updates."""

EACH_LINE = 25.0
"""Seconds between lines if stderr is not a terminal."""

FILE, KEPT_SECONDS, MOST_KEPT = "waits.json", 10.0, 200
"""Name of the file of earlier waits in the user's cache; seconds of the shortest wait stored; maximum stored waits."""


@contextmanager
def waiting(what: str) -> Iterator[None]:
    """Print what the command is waiting for, and since when: a transient line on a terminal, else occasional lines.

    Nothing is printed for waits below half a second. A wait of at least `KEPT_SECONDS` is stored for this user; the
    next wait for the same thing shows how long the last one took.
    """
    done, began = threading.Event(), time.monotonic()
    thread = threading.Thread(target=_say, args=(what, done, began), daemon=True)
    thread.start()
    try:
        yield
        if (seconds := time.monotonic() - began) >= KEPT_SECONDS:
            kept = {name: each for name, each in _kept().items() if name != what} | {what: round(seconds, 1)}
            with suppress(MeshwrightError, OSError):
                (file := user_cache() / FILE).parent.mkdir(parents=True, exist_ok=True)
                write_file(file, json.dumps(dict(list(kept.items())[-MOST_KEPT:]), indent=1))
    finally:
        done.set()
        thread.join()


def _kept() -> dict[str, float]:
    """Return the seconds of this user's earlier waits by what was waited for, latest last."""
    try:
        found = json.loads((user_cache() / FILE).read_text())
    except (OSError, ValueError):
        return {}
    items = found.items() if isinstance(found, dict) else ()
    return {name: float(each) for name, each in items if isinstance(each, float | int)}


def _say(what: str, done: threading.Event, began: float) -> None:
    """Print `what` and the elapsed time on stderr, again and again, until `done` is set."""
    out, last = sys.stderr, _kept().get(what)
    before = "" if last is None else f" (last time {show_seconds(last)})"
    is_terminal = out.isatty()
    wait = FIRST if is_terminal else EACH_LINE
    try:
        while not done.wait(wait):
            seconds = f"{time.monotonic() - began:.0f} s"
            seconds += before if is_terminal else f" so far{before}"
            if is_terminal:
                room = shutil.get_terminal_size().columns - len(seconds) - 3
                print(f"\r{what[:room]}: {seconds}", end="", file=out, flush=True)
            else:
                print(f"{what}: {seconds}", file=out, flush=True)
            wait = AGAIN if is_terminal else EACH_LINE
        if is_terminal and wait == AGAIN:
            print("\r\x1b[K", end="", file=out, flush=True)
    except (OSError, ValueError):
        pass  # Nobody reads stderr.
