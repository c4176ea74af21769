"""A run that is asked to stop (SIGINT, SIGTERM) finishes its step and saves, or leaves at once while it compiles.

SIGTERM is how a supervisor stops a run (Slurm, Kubernetes, systemd): it kills the process some seconds later, so that
whatever is to be saved has to be saved within a grace period.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jax.experimental.multihost_utils import process_allgather

from meshwright.training.checkpoint import Note

SIGNALS = (signal.SIGINT, signal.SIGTERM)

Leave = Callable[[int, bool], None]
"""Ends the process: the signal it was asked with, and whether the grace period of a SIGTERM is over."""


@dataclass
class Interruption:
    """The signal that asked a run to stop, None as long as none did, and whether a first step has been taken."""

    signal: int | None = None
    has_begun: bool = False
    start_grace: Callable[[], None] = field(default=lambda: None, repr=False)
    """Begins the grace period, once."""

    def agree(self, *flags: bool) -> tuple[bool, ...]:
        """Have all processes of a run know of a signal that one of them had, and of flags that are true at one.

        A signal reaches the processes at different steps, and one that left the others would have them wait for ever.
        """
        if jax.process_count() == 1:
            return flags
        own = np.array([self.signal or 0, *flags], np.int32)
        signal_number, *found = np.max(process_allgather(own), axis=0).tolist()
        self.signal = signal_number or None
        if self.signal == signal.SIGTERM:
            self.start_grace()
        return tuple(map(bool, found))


@contextmanager
def interruptions(on_note: Note, leave: Leave | None, *, grace_seconds: float) -> Iterator[Interruption]:
    """Note signals instead of ending on the first of them; a second one ends the process as ever.

    Args:
        on_note: called with the line that says what happens.
        leave: called where a signal comes before the first step is taken, and where the grace period of a SIGTERM ends
            before the context does. It ends the process: the main thread may be in a compiler or wait for a disk, and
            Python's own handlers have to wait for it, so other threads call it. None: nothing ends the process.
        grace_seconds: the grace period.
    """
    if threading.current_thread() is not threading.main_thread():
        yield Interruption()  # Handlers can only be set in the main thread; whoever started this one has theirs.
        return
    state = Interruption()
    grace = threading.Timer(grace_seconds, lambda: leave and leave(signal.SIGTERM, True))
    grace.daemon = True
    before: dict[int, Any] = {}

    def start_grace() -> None:
        if grace.ident is None:
            grace.start()

    state.start_grace = start_grace

    def note(number: int, _: object) -> None:
        state.signal = number
        signal.signal(number, before[number])
        if number == signal.SIGTERM:
            start_grace()
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
                leave(received[0], False)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield state
    finally:
        grace.cancel()
        signal.set_wakeup_fd(old)
        os.close(writer)
        watcher.join()
        os.close(reader)
        for number, handler in before.items():
            signal.signal(number, handler)
