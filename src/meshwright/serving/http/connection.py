"""uvicorn's HTTP protocol with more limits: size and time of the headers, and time in which a client reads nothing.

Errors before a request reaches the app have JSON bodies too.
"""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from meshwright.serving.http.errors import CLOSE, ApiError
from meshwright.serving.http.middleware import headers_too_large
from meshwright.serving.http.service import RequestLimits


def limited_protocol(limits: RequestLimits) -> type[asyncio.Protocol]:
    """Return the protocol class for a server with these limits."""
    return type("LimitedProtocol", (_LimitedProtocol,), {"limits": limits})


PROCESSING = b"HTTP/1.1 102 Processing\r\n\r\n"
"""The probe: an interim status, which clients skip. Sending it to a client that is gone resets the connection."""

PROBE_SECONDS = 0.2
"""Seconds between two probes: if the first one caused a reset, the connection is closed before the second."""


class _LimitedProtocol(HttpToolsProtocol):
    """One connection. A head is the request line and headers of one request."""

    limits: RequestLimits
    _is_in_head = True
    _head_bytes = 0
    _head_timer: asyncio.TimerHandle | None = None
    _unread_timer: asyncio.TimerHandle | None = None
    _probe_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._start_head_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_head_timer()
        self._stop_unread_timer()
        if self._probe_timer is not None:
            self._probe_timer.cancel()
        super().connection_lost(exc)

    def eof_received(self) -> bool:
        """Return whether to keep the connection of a client that sends no more: only if it awaits an answer."""
        cycle = self.cycle
        if (
            self._is_in_head
            and cycle is not None
            and not cycle.response_complete
            and cycle.scope["http_version"] == "1.1"
        ):
            cycle.keep_alive = False
            self._probe()
            return True
        return False

    def _probe(self) -> None:
        """Until the answer starts, check repeatedly that a client which sends no more is still connected."""
        if not self.transport.is_closing() and not self.cycle.response_started:
            self.transport.write(PROCESSING)
            self._probe_timer = self.loop.call_later(PROBE_SECONDS, self._probe)

    def pause_writing(self) -> None:
        # Abort: after `close`, unread data in the buffer would keep the connection open.
        self._unread_timer = self.loop.call_later(self.limits.unread_seconds, self.transport.abort)
        super().pause_writing()

    def resume_writing(self) -> None:
        self._stop_unread_timer()
        super().resume_writing()

    def data_received(self, data: bytes) -> None:
        if self._is_in_head:
            self._head_bytes += len(data)
            self._start_head_timer()
        super().data_received(data)
        if self._is_in_head and self._head_bytes > self.limits.head_bytes and not self.transport.is_closing():
            self._reject(headers_too_large(self.limits.head_bytes))

    def on_headers_complete(self) -> None:
        self._is_in_head = False
        self._stop_head_timer()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._is_in_head, self._head_bytes = True, 0
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        del msg
        self._reject(ApiError("this is not a valid HTTP/1.1 request", code="invalid_http", headers=CLOSE))

    def _start_head_timer(self) -> None:
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(self.limits.head_seconds, self._on_head_timeout)

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _stop_unread_timer(self) -> None:
        if self._unread_timer is not None:
            self._unread_timer.cancel()
            self._unread_timer = None

    def _on_head_timeout(self) -> None:
        seconds = self.limits.head_seconds
        message = f"the request line and headers were not complete after {seconds:g} s; send them faster"
        self._reject(ApiError(message, status=408, headers=CLOSE))

    def _reject(self, error: ApiError) -> None:
        """Send an error and close the connection, without calling the app. A response that has started is cut off."""
        if self.transport.is_closing():
            return
        if self.cycle is None or self.cycle.response_complete or not self.cycle.response_started:
            body = error.json()
            phrase = HTTPStatus(error.status).phrase
            head = f"HTTP/1.1 {error.status} {phrase}\r\ncontent-type: application/json\r\nconnection: close\r\n"
            self.transport.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        self.transport.close()
