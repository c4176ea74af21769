"""A TCP relay on this machine that keeps connections open when the service behind it is gone.

JAX's client aborts its process with a page of C++ output as soon as its connection to the service closes, which happens
when process 0 dies. Through a relay, the client only notices after its own timeout of 100 s; before that the processes
report in one line what happened (`member`). Only JAX's coordination messages pass through the relay, no step data.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable


class Relay:
    """Listens on a free port of this machine (the attribute `port`), and forwards each connection to a service.

    Args:
        seconds: how long to try to connect to the service.
        on_failure: called, in a thread, with the reason if no connection succeeded in that time.
    """

    def __init__(self, host: str, port: int, *, seconds: float, on_failure: Callable[[str], None]) -> None:
        self._to, self._seconds, self._on_failure = (host, port), seconds, on_failure
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            near, _ = self._listener.accept()
            threading.Thread(target=self._connect, args=(near,), daemon=True).start()

    def _connect(self, near: socket.socket) -> None:
        until = time.monotonic() + self._seconds
        while True:
            try:
                far = socket.create_connection(self._to, timeout=5.0)
                break
            except OSError as error:
                if time.monotonic() > until:
                    near.close()
                    self._on_failure(str(error.strerror or error))
                    return
                time.sleep(0.1)
        with near, far:
            for connection in (near, far):
                connection.settimeout(None)
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            back = threading.Thread(target=_pass_on, args=(far, near), daemon=True)
            back.start()
            _pass_on(near, far)
            # `_pass_on` waits for the client: until then its connection is open, even if the service is gone.
            with contextlib.suppress(OSError):
                far.shutdown(socket.SHUT_RDWR)
            back.join()


def _pass_on(source: socket.socket, target: socket.socket) -> None:
    """Forward bytes from `source` to `target` until `source` closes."""
    with contextlib.suppress(OSError):
        while received := source.recv(1 << 16):
            target.sendall(received)
