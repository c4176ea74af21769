"""ASGI middleware: API keys, the size of headers, readiness, request ids, a count of responses, and CORS."""

from __future__ import annotations

import hmac
import uuid

from prometheus_client import Counter
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from meshwright.serving.http.errors import CLOSE, ApiError
from meshwright.serving.http.service import ServerState

PUBLIC_PATHS = {"/", "/health", "/ready"}
"""Paths that need no API key: the chat page, which asks its user for one, and the probes of supervisors."""

ALWAYS_AVAILABLE = {*PUBLIC_PATHS, "/metrics", "/openapi.json", "/v1/models"}
"""Paths that are answered before the server is ready and while it shuts down."""


def add_middleware(app: ASGIApp, state: ServerState, requests: Counter, paths: frozenset[str]) -> ASGIApp:
    """Wrap an app in `ServerMiddleware`, and in CORS if the server has allowed origins.

    Args:
        app: the app of the endpoints.
        state: keys, limits and readiness.
        requests: counts responses by endpoint and status.
        paths: the paths that are counted by name; all others count as "other".
    """
    app = ServerMiddleware(app, state, requests, paths)
    if state.cors_origins:
        app = CORSMiddleware(
            app, allow_origins=state.cors_origins, allow_methods=["GET", "POST"], allow_headers=["*"],
            expose_headers=["x-request-id", "retry-after"],
        )  # fmt: skip
    return app


class ServerMiddleware:
    """Check each request, count responses, and give each an x-request-id; see `add_middleware`."""

    def __init__(self, app: ASGIApp, state: ServerState, requests: Counter, paths: frozenset[str]) -> None:
        self._app = app
        self._state = state
        self._requests = requests
        self._paths = paths
        self._keys = [key.encode() for key in state.api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] != "http":
            return
        path: str = scope["path"]
        request_id = uuid.uuid4().hex.encode()

        async def send_counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (b"x-request-id", request_id)]
                endpoint = path if path in self._paths else "other"
                self._requests.labels(endpoint, str(message["status"])).inc()
            await send(message)

        error = self._rejection(scope, path)
        if error is not None:
            await error.response()(scope, receive, send_counted)
            return
        self._state.num_active += 1
        try:
            await self._app(scope, receive, send_counted)
        finally:
            self._state.num_active -= 1

    def _rejection(self, scope: Scope, path: str) -> ApiError | None:
        """The error of a request that is not passed to the app; None for one that is."""
        headers: list[tuple[bytes, bytes]] = scope["headers"]
        size = sum(len(name) + len(value) + 4 for name, value in headers) + len(scope["raw_path"])
        if size > self._state.limits.head_bytes:
            return headers_too_large(self._state.limits.head_bytes)
        if path not in PUBLIC_PATHS and scope["method"] != "OPTIONS" and not self._has_key(headers):
            return ApiError(
                "the request has no valid API key for this server; send it as `Authorization: Bearer KEY`",
                status=401, code="invalid_api_key", headers={"www-authenticate": "Bearer"},
            )  # fmt: skip
        if path not in ALWAYS_AVAILABLE and self._state.is_draining:
            return shutting_down()
        if path not in ALWAYS_AVAILABLE and not self._state.is_ready:
            return ApiError(
                "the model is not ready yet; try again, /ready answers 200 when it is",
                status=503, code="not_ready", headers={"retry-after": "5"},
            )  # fmt: skip
        return None

    def _has_key(self, headers: list[tuple[bytes, bytes]]) -> bool:
        if not self._keys:
            return True
        header = next((value for name, value in headers if name == b"authorization"), b"")
        scheme, _, key = header.partition(b" ")
        # Compare with every key, each in constant time, so that the duration reveals nothing about the keys.
        matches = [hmac.compare_digest(key.strip(), known) for known in self._keys]
        return scheme.lower() == b"bearer" and any(matches)


def headers_too_large(limit: int) -> ApiError:
    """The error of a request line and headers over the limit, in bytes."""
    return ApiError(
        f"the request line and headers are over {limit:,} bytes; send fewer or shorter headers",
        status=431, code="too_large", headers=CLOSE,
    )  # fmt: skip


def shutting_down() -> ApiError:
    """The error of a request to a server that is shutting down."""
    return ApiError(
        "the server is shutting down; use another one, or try again once it is back",
        status=503, code="shutting_down", headers=CLOSE | {"retry-after": "5"},
    )  # fmt: skip
