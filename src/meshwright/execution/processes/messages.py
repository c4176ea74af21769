"""Messages between processes: a JSON object a line, over TCP."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from typing import Any

LONGEST = 1 << 20
"""Maximum bytes of a message; a longer one does not come from a process of a run."""

BEAT_SECONDS = 1.0
"""Seconds between heartbeats."""

SILENT_SECONDS = 20.0
"""A process that is silent for this long is lost. A compiler that holds Python's lock may cause some silence."""

PAUSE_SECONDS = 5.0
"""A process that itself slept this long (SIGSTOP, a suspended machine) counts the silence of others anew."""


def send(connection: socket.socket, message: dict[str, Any]) -> None:
    """Send a message; raises OSError if the other side is gone."""
    connection.sendall(json.dumps(message).encode() + b"\n")


class Inbox:
    """Splits the bytes received over a connection into messages."""

    def __init__(self) -> None:
        self._bytes = b""

    def add(self, received: bytes) -> Iterator[dict[str, Any]]:
        """Yield each complete message. Raises ValueError for invalid ones."""
        *lines, self._bytes = (self._bytes + received).split(b"\n")
        if len(self._bytes) > LONGEST:
            raise ValueError("a message without an end")
        for line in lines:
            message = json.loads(line)
            if not isinstance(message, dict):
                raise ValueError("not a message")
            yield message
