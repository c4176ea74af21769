"""A run that is asked to stop (SIGINT, SIGTERM) finishes its step, or leaves at once while it compiles."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from meshwright.training.checkpoint import Note

SIGNALS = (signal.SIGINT, signal.SIGTERM)


@dataclass
class Interruption:
    """Whether the process was asked to stop, and whether a first step has been taken by then."""

    is_asked: bool = False
    has_begun: bool = False


@contextmanager
def interruptions(on_note: Note, leave: Callable[[], None] | None) -> Iterator[Interruption]:
    """Note signals instead of ending on the first of them; a second one ends the process as ever.

    leave: called where a signal comes before the first step is taken. It ends the process: the main thread may be in a
    compiler for a minute, and Python's own handlers have to wait for it, so another thread waits for the signal.
    """
    if threading.current_thread() is not threading.main_thread():
        yield Interruption()  # Handlers can only be set in the main thread; whoever started this one has theirs.
        return
    state = Interruption()
    before: dict[int, Any] = {}

    def note(number: int, _: object) -> None:
        state.is_asked = True
        signal.signal(number, before[number])
        if state.has_begun or leave is None:
            on_note("stopping after this step; once more stops at once")

    for number in SIGNALS:
        before[number] = signal.signal(number, note)
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    old = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)

    def watch() -> None:
        while received := os.read(reader, 1):
            if received[0] in SIGNALS and not state.has_begun and leave is not None:
                leave()

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield state
    finally:
        signal.set_wakeup_fd(old)
        os.close(writer)
        watcher.join()
        os.close(reader)
        for number, handler in before.items():
            signal.signal(number, handler)
