"""What other threads hand to the engine's thread: requests, ends of requests, and calls between two steps."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from threading import Condition
from time import monotonic

from meshwright.serving.engine.active_request import ActiveRequest
from meshwright.serving.engine.faults import DeviceError
from meshwright.serving.engine.request import ClosedError

PAUSE_SECONDS, MOST_SECONDS = 0.004, 0.02
"""An idle engine starts after a pause of this length in arrivals, or after this maximum delay, to batch requests."""


class Call:
    """A function that the engine's thread calls for another thread, which waits for it."""

    def __init__(self, function: Callable[[], None]) -> None:
        self._function, self.done = function, Future[None]()

    def run(self) -> None:
        """Call the function; its exception is the waiting thread's, and raised here too if a device failed."""
        try:
            self.done.set_result(self._function())
        except Exception as error:
            self.done.set_exception(error)
            if isinstance(error, DeviceError):
                raise


class EngineInbox:
    """A queue of (request id, new request), (request id, None) for the end of one, and ("", call).

    Attributes:
        changed: its lock; notified when an item is added or the inbox closes.
        failure: what ended the engine; empty while it runs.
    """

    def __init__(self) -> None:
        self.changed = Condition()
        self.is_closing, self.is_receiving, self.failure = False, False, ""
        self._items = deque[tuple[str, ActiveRequest | Call | None]]()

    def __len__(self) -> int:
        return len(self._items)

    @property
    def requests(self) -> list[ActiveRequest]:
        """The new requests."""
        with self.changed:
            return [item for _, item in self._items if isinstance(item, ActiveRequest)]

    def add(self, request_id: str, item: ActiveRequest | Call | None, check: Callable[[], None] = lambda: None) -> None:
        """Add an item. check: raises if a new request must not be added.

        Raises:
            ClosedError: the engine is shutting down or has failed.
        """
        with self.changed:
            if item is not None and self.failure:
                raise ClosedError(f"the engine has failed: {self.failure}")
            if item is not None and self.is_closing:
                raise ClosedError("the engine is shutting down")
            check()
            self._items.append((request_id, item))
            self.changed.notify()

    def call(self, function: Callable[[], None]) -> None:
        """Call a function on the engine's thread, between two steps, and wait for it; raises its exception."""
        call = Call(function)
        self.add("", call)
        call.done.result()

    def close(self) -> None:
        """Add no more requests, and end all waits."""
        with self.changed:
            self.is_closing = True
            self.changed.notify()

    def wait(self, seconds: float) -> None:
        """Wait for an item, at most so long."""
        with self.changed:
            self.changed.wait_for(lambda: self._items or self.is_closing, seconds)

    def num_received(self, *, is_idle: bool) -> int:
        """Return the number of items to take now. is_idle: wait for the first, and a little for others."""
        with self.changed:
            if is_idle:
                self.changed.wait_for(lambda: self._items or self.is_closing)
                latest, seen = monotonic() + MOST_SECONDS, 0
                while seen < len(self._items) and monotonic() < latest:
                    seen = len(self._items)
                    self.changed.wait_for(lambda: len(self._items) > seen or self.is_closing, PAUSE_SECONDS)  # noqa: B023
            count = 0 if self.is_closing else len(self._items)
            self.is_receiving = count > 0
            return count

    def pop(self) -> tuple[str, ActiveRequest | Call | None]:
        """Take the oldest item."""
        with self.changed:
            return self._items.popleft()

    def pop_all(self, error: str) -> list[ActiveRequest]:
        """Take all new requests; end the calls with an error."""
        with self.changed:
            items, self._items = self._items, deque()
        for _, item in items:
            if isinstance(item, Call):
                item.done.set_exception(ClosedError(error))
        return [item for _, item in items if isinstance(item, ActiveRequest)]
