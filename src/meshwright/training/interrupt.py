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
from functools import partial
from typing import Any

import jax
import numpy as np
from jax import Array
from jax.sharding import NamedSharding, PartitionSpec

from meshwright.training.checkpoint import Note

SIGNALS = (signal.SIGINT, signal.SIGTERM)

Leave = Callable[[int, bool], None]
"""Ends the process: the signal it was asked with, and whether the grace period of a SIGTERM is over."""


@dataclass
class Interruption:
    """The signal that asked this process to stop, None as long as none did, and whether a first step was taken."""

    signal: int | None = None
    has_begun: bool = False
    start_grace: Callable[[], None] = field(default=lambda: None, repr=False)
    """Begins the grace period, once."""
    _agreed: int | None = None
    _asked: Array | None = None

    @property
    def stop(self) -> int | None:
        """The signal that the run stops for, which all its processes agree on."""
        return self.signal if jax.process_count() == 1 else self._agreed

    def agree(self, *, waits: bool) -> None:
        """Have all processes of a run know of a signal that one of them had; all call this after the same step.

        A signal reaches processes at different steps, and one that left the others would have them wait for ever.
        waits: for the devices, which answer after the step that they are at; else the answer is of the call before.
        """
        if jax.process_count() == 1:
            return
        asked, self._asked = self._asked, _largest_of_processes(self.signal or 0)
        if (answer := self._asked if waits else asked) is not None:
            self._agreed = int(answer) or None
        if self._agreed == signal.SIGTERM:
            self.start_grace()


def _largest_of_processes(number: int) -> Array:
    """The largest of the numbers of all processes, at each; the devices are not waited for."""
    mesh = jax.make_mesh((jax.device_count(),), ("device",), devices=jax.devices())
    with jax.set_mesh(mesh):
        spread, whole = NamedSharding(mesh, PartitionSpec("device")), NamedSharding(mesh, PartitionSpec())
        numbers = jax.make_array_from_callback((jax.device_count(),), spread, lambda _: np.array([number], np.int32))
        return _max(numbers, whole)


@partial(jax.jit, static_argnums=1)
def _max(numbers: Array, sharding: NamedSharding) -> Array:
    return jax.reshard(numbers, sharding).max()


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
