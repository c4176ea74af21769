"""Stop a run on SIGINT, SIGTERM or SIGHUP: finish the current step and save, or end at once before the first step.

A supervisor (Slurm, Kubernetes, systemd) stops a run with SIGTERM and kills the process some seconds later, so
everything must be saved within that grace period. SIGHUP, sent when a terminal is closed, is treated like SIGTERM.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache

import jax
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from meshwright.execution.training.run_directory.checkpoint import Note
from meshwright.support.signals import drop_terminals, find_terminals, handled_signals, has_default

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

Leave = Callable[[int, bool], None]
"""Ends the process. Arguments: the signal, and whether the grace period of a SIGTERM is over."""


@dataclass
class Interruption:
    """Whether and why a run was asked to stop.

    Args:
        signal: the signal that this process received; None if it received none.
        has_begun: whether the first step was taken.
    """

    signal: int | None = None
    has_begun: bool = False
    start_grace: Callable[[], None] = field(default=lambda: None, repr=False)
    """Starts the grace period; further calls do nothing."""
    _agreed: int | None = None
    """The signal that any process received, as of the last answer of `agree`; None for none."""
    _asked: Array | None = None
    """Array of the last call of `agree`, which the devices may still compute: (largest signal, largest flag)."""

    @property
    def stop(self) -> int | None:
        """The signal for which all processes of the run agreed to stop; None while they continue."""
        return self.signal if jax.process_count() == 1 else self._agreed

    def agree(self, flag: bool, *, waits: bool) -> bool:
        """Return whether a flag is true on any process of a run, and set `stop` if any process received a signal.

        All processes call this after the same step. Signals and clocks differ between processes, and a process that
        stopped alone would leave the others waiting.

        Args:
            flag: this process's value of the flag.
            waits: wait for the devices, which answer after their current step. If False, use the answer to the previous
                call, False at the first one.
        """
        if jax.process_count() == 1:
            return flag
        asked, self._asked = self._asked, _largest_of_processes(self.signal or 0, int(flag))
        if (answer := self._asked if waits else asked) is None:
            return False
        number, flag_of_any = np.asarray(answer.addressable_data(0)).tolist()
        self._agreed = number or None
        if self._agreed == signal.SIGTERM:
            self.start_grace()
        return bool(flag_of_any)


def _largest_of_processes(*numbers: int) -> Array:
    """Return the maximum of each number over all processes, as an array [n]. Does not wait for the devices."""
    mesh = _all_devices()
    with jax.set_mesh(mesh):
        spread, row = NamedSharding(mesh, PartitionSpec("device")), np.array([numbers], np.int32)
        rows = jax.make_array_from_callback((mesh.size, len(numbers)), spread, lambda _: row)
        return _largest(rows)


@cache
def _all_devices() -> Mesh:
    return jax.make_mesh((jax.device_count(),), ("device",), devices=jax.devices())


@jax.jit
def _largest(rows: Array) -> Array:
    return jax.reshard(rows, PartitionSpec()).max(axis=0)


@contextmanager
def interruptions(on_note: Note, leave: Leave | None, *, grace_seconds: float) -> Iterator[Interruption]:
    """Inside the context, record the first signal in the yielded `Interruption`; a second one ends the process.

    If `leave` is None, signals for which the calling program has its own handler are left to it; it can stop a run by
    an exception in the callback `on_step`. An ignored SIGHUP stays ignored, as nohup expects.

    Args:
        on_note: called with a line for the user when a signal arrives.
        leave: ends the process if a signal arrives before the first step, or when the grace period of a SIGTERM is
            over. It is called from other threads, because the main thread may be in a compiler or wait for a disk,
            where Python's own handlers cannot run. None: the process is never ended.
        grace_seconds: the grace period: the time from a SIGTERM until `leave` is called.
    """
    if threading.current_thread() is not threading.main_thread():
        yield Interruption()  # Handlers can only be set in the main thread; this thread's owner handles signals.
        return
    state = Interruption()
    grace = threading.Timer(grace_seconds, lambda: leave and leave(signal.SIGTERM, True))
    grace.daemon = True

    def start_grace() -> None:
        if grace.ident is None:
            grace.start()

    state.start_grace = start_grace
    own = [number for number in SIGNALS if leave is not None or has_default(number)]
    own = [number for number in own if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN]
    terminals = find_terminals()

    def hang_up(_: int, __: object) -> None:
        # A shell may pass SIGHUP on, so it may arrive twice for one request.
        drop_terminals(terminals)
        if state.signal is None:
            note(signal.SIGTERM, None)

    def note(number: int, _: object) -> None:
        state.signal = number
        if number == signal.SIGTERM:
            start_grace()
        if state.has_begun or leave is None:
            on_note("stopping after this step; once more stops at once")

    def end_before_first_step(number: int) -> None:
        if number == signal.SIGHUP:
            drop_terminals(terminals)
            number = signal.SIGTERM
        if number in SIGNALS and not state.has_begun and leave is not None:
            leave(number, False)

    asking = [number for number in own if number != signal.SIGHUP]
    hanging = [number for number in own if number == signal.SIGHUP]
    # Set the handlers first: without one, a signal written to the pipe also has its default effect.
    old: int | None = None
    with _watched_pipe(end_before_first_step) as writer:
        try:
            with handled_signals(asking, note, once=True), handled_signals(hanging, hang_up):
                old = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
                if state.signal is not None:
                    os.write(writer, bytes([state.signal]))
                yield state
        finally:
            grace.cancel()
            if old is not None:
                signal.set_wakeup_fd(old)


@contextmanager
def _watched_pipe(on_byte: Callable[[int], None]) -> Iterator[int]:
    """Yield the writing end of a pipe; another thread calls `on_byte` with each byte written to it."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)

    def watch() -> None:
        while received := os.read(reader, 1):
            on_byte(received[0])

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield writer
    finally:
        os.close(writer)
        watcher.join()
        os.close(reader)
