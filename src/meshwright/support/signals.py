"""Temporary signal handlers, and discarding output to terminals that were closed."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType


@contextmanager
def handled_signals(
    numbers: Iterable[int], handle: Callable[[int, FrameType | None], object], *, once: bool = False
) -> Iterator[None]:
    """Handle some signals with a function inside a context; afterwards their former handlers are restored.

    Does nothing outside the main thread, the only one in which Python allows handlers.

    Args:
        numbers: the signals.
        handle: called with the signal and the interrupted frame.
        once: restore a signal's former handler at its first arrival, before `handle` is called.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    # All former handlers are read before the first new one is set, since a signal may come at once.
    before = {number: signal.getsignal(number) for number in numbers}

    def handle_once(number: int, frame: FrameType | None) -> None:
        signal.signal(number, before[number])
        handle(number, frame)

    try:
        for number in before:
            signal.signal(number, handle_once if once else handle)
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def not_ignored(numbers: Iterable[int]) -> list[int]:
    """Return the signals that are not ignored; ignored ones should stay ignored, as nohup requires."""
    return [number for number in numbers if signal.getsignal(number) != signal.SIG_IGN]


def has_default(number: int) -> bool:
    """Whether a signal has Python's default handler."""
    return signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler)


def find_terminals() -> list[int]:
    """Return the descriptors (0, 1, 2) of the standard streams that are terminals, without terminals already closed."""
    return [descriptor for descriptor in (0, 1, 2) if os.isatty(descriptor)]


def drop_terminals(descriptors: Iterable[int]) -> None:
    """Discard output to terminals that were closed (SIGHUP), where every write fails."""
    with suppress(OSError):
        nowhere = os.open(os.devnull, os.O_RDWR)
        for descriptor in descriptors:
            os.dup2(nowhere, descriptor)
        os.close(nowhere)
