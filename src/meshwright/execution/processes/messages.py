"""Messages between the processes of a run: one JSON object per line, over TCP."""

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
"""A process that sends nothing for this long counts as lost. A compiler that holds Python's lock delays heartbeats."""

PAUSE_SECONDS = 5.0
"""A process that was itself paused this long (SIGSTOP, a suspended machine) restarts its clocks of others' silence."""


def send(connection: socket.socket, message: dict[str, Any]) -> None:
    """Send a message. Raises OSError if the other process is gone."""
    connection.sendall(json.dumps(message).encode() + b"\n")


class Inbox:
    """Splits the bytes received over a connection into messages."""

    def __init__(self) -> None:
        self._bytes = b""

    def add(self, received: bytes) -> Iterator[dict[str, Any]]:
        """Add received bytes; yield each message that is complete now. Raises ValueError for an invalid message."""
        *lines, self._bytes = (self._bytes + received).split(b"\n")
        if len(self._bytes) > LONGEST:
            raise ValueError("a message without an end")
        for line in lines:
            message = json.loads(line)
            if not isinstance(message, dict):
                raise ValueError("not a message")
            yield message
