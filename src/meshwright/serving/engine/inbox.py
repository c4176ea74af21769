"""The queue from other threads to the engine's thread: new requests, aborts of requests, and functions to call."""

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
"""An idle engine that receives a request waits for more, to batch them.

It waits until none arrives for `PAUSE_SECONDS`, but at most `MOST_SECONDS`.
"""


class Call:
    """A function that the engine's thread calls for another thread; the other thread waits until it returns."""

    def __init__(self, function: Callable[[], None]) -> None:
        self._function, self.done = function, Future[None]()

    def run(self) -> None:
        """Call the function. An exception is raised in the waiting thread; a `DeviceError` is raised here too."""
        try:
            self.done.set_result(self._function())
        except Exception as error:
            self.done.set_exception(error)
            if isinstance(error, DeviceError):
                raise


class EngineInbox:
    """A queue of pairs: (request id, new request), (request id, None) to abort a request, and ("", call).

    Attributes:
        changed: the queue's lock; notified when an item is added or the inbox closes.
        is_closing: whether `close` was called.
        is_receiving: whether the engine's thread is taking the items that `num_received` counted.
        failure: the error that ended the engine; empty while it runs.
    """

    def __init__(self) -> None:
        self.changed = Condition()
        self.is_closing, self.is_receiving, self.failure = False, False, ""
        self._items = deque[tuple[str, ActiveRequest | Call | None]]()

    def __len__(self) -> int:
        return len(self._items)

    @property
    def requests(self) -> list[ActiveRequest]:
        """The new requests in the queue."""
        with self.changed:
            return [item for _, item in self._items if isinstance(item, ActiveRequest)]

    def add(self, request_id: str, item: ActiveRequest | Call | None, check: Callable[[], None] = lambda: None) -> None:
        """Add an item to the queue. check: called first; if it raises, the item is not added.

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
        """Have the engine's thread call a function between two steps. Wait for it, and raise its exception."""
        call = Call(function)
        self.add("", call)
        call.done.result()

    def close(self) -> None:
        """Refuse new requests from now on, and end all waits."""
        with self.changed:
            self.is_closing = True
            self.changed.notify()

    def wait(self, seconds: float) -> None:
        """Wait until the queue has an item, at most for this time."""
        with self.changed:
            self.changed.wait_for(lambda: self._items or self.is_closing, seconds)

    def num_received(self, *, is_idle: bool) -> int:
        """Return the number of items that the engine's thread takes now; 0 if the inbox is closing.

        is_idle: whether the engine has no work. Then wait for the first item, and briefly for more (`PAUSE_SECONDS`).
        """
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
        """Remove the oldest item, and return it."""
        with self.changed:
            return self._items.popleft()

    def pop_all(self, error: str) -> list[ActiveRequest]:
        """Empty the queue and return its new requests. Threads that wait for a `Call` get a `ClosedError(error)`."""
        with self.changed:
            items, self._items = self._items, deque()
        for _, item in items:
            if isinstance(item, Call):
                item.done.set_exception(ClosedError(error))
        return [item for _, item in items if isinstance(item, ActiveRequest)]
