"""Messages between processes: a JSON object a line, over TCP."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from typing import Any

LONGEST = 1 << 20
"""The most bytes of a message; a longer one comes from something else than a process of a run."""

BEAT_SECONDS = 1.0
"""Interval of heartbeats."""

SILENT_SECONDS = 20.0
"""A process that was not heard for so long is lost. A compiler that holds Python's lock may be silent for some."""

PAUSE_SECONDS = 5.0
"""Who has slept for so long itself (SIGSTOP, a suspended machine) knows nothing of the others: silence counts anew."""


def send(connection: socket.socket, message: dict[str, Any]) -> None:
    """Send a message; raises OSError where nobody takes it."""
    connection.sendall(json.dumps(message).encode() + b"\n")


class Inbox:
    """The bytes that came over a connection, as messages."""

    def __init__(self) -> None:
        self._bytes = b""

    def add(self, received: bytes) -> Iterator[dict[str, Any]]:
        """Return each complete message. Raises ValueError for invalid ones."""
        *lines, self._bytes = (self._bytes + received).split(b"\n")
        if len(self._bytes) > LONGEST:
            raise ValueError("a message without an end")
        for line in lines:
            message = json.loads(line)
            if not isinstance(message, dict):
                raise ValueError("not a message")
            yield message
