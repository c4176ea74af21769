"""ASGI middleware: API keys with their limits, header size, readiness, request ids, a count of responses, and CORS."""

from __future__ import annotations

import hmac
import uuid
from collections import Counter as Counts

from prometheus_client import Counter
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from meshwright.serving.http.errors import CLOSE, ApiError
from meshwright.serving.http.hosts import refuse_foreign
from meshwright.serving.http.service import ApiKey, RequestLimits, ServerState

PUBLIC_PATHS = {"/", "/health", "/ready"}
"""Paths that need no API key: the chat page, which asks the user for a key, and health probes."""

PROBES = {"/health", "/ready"}
"""Paths that are answered for any Host header, because load balancers may send their own."""

ALWAYS_AVAILABLE = {*PUBLIC_PATHS, "/metrics", "/openapi.json", "/v1/models"}
"""Paths that are answered before the server is ready and while it shuts down."""


LIMITS, API_KEY, REQUEST_ID = "meshwright.limits", "meshwright.api_key", "meshwright.request_id"
"""Keys of an ASGI scope: the request's limits (`RequestLimits`), its API key (empty for none), and its id."""


def add_middleware(app: ASGIApp, state: ServerState, requests: Counter, paths: frozenset[str]) -> ASGIApp:
    """Wrap an app in `ServerMiddleware`, and in CORS if the server has allowed origins.

    Args:
        app: the app with the endpoints.
        state: API keys, limits and readiness.
        requests: metric that counts responses by endpoint and status.
        paths: paths that the metric counts by name; it counts all others as "other".
    """
    app = ServerMiddleware(app, state, requests, paths)
    if state.cors_origins:
        app = CORSMiddleware(
            app, allow_origins=state.cors_origins, allow_methods=["GET", "POST"], allow_headers=["*"],
            expose_headers=["x-request-id", "retry-after"],
        )  # fmt: skip
    return app


class ServerMiddleware:
    """Checks each request, counts responses, and adds an x-request-id to each response; see `add_middleware`."""

    def __init__(self, app: ASGIApp, state: ServerState, requests: Counter, paths: frozenset[str]) -> None:
        self._app = app
        self._state = state
        self._requests = requests
        self._paths = paths
        self._num_open = Counts[ApiKey | None]()
        """Number of unanswered requests to the model by API key; requests without a key count under None."""

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

        header = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        scheme, _, key = header.partition(b" ")
        # Compare with every key, each in constant time, so that the duration reveals nothing about the keys.
        matches = [each for each in self._state.api_keys if hmac.compare_digest(key.strip(), each.key.encode())]
        key = matches[0] if matches and scheme.lower() == b"bearer" else None
        limits = key.limits if key and key.limits else self._state.limits
        error = self._rejection(scope, path, key, limits)
        if error is not None:
            await error.response()(scope, receive, send_counted)
            return
        scope.update({LIMITS: limits, API_KEY: key.key if key else "", REQUEST_ID: request_id.decode()})
        is_counted = path not in ALWAYS_AVAILABLE
        self._state.num_active += 1
        self._num_open[key] += is_counted
        try:
            await self._app(scope, receive, send_counted)
        finally:
            self._state.num_active -= 1
            self._num_open[key] -= is_counted

    def _rejection(self, scope: Scope, path: str, key: ApiKey | None, limits: RequestLimits) -> ApiError | None:
        """Return the error response to a request that is rejected; None if the app answers the request.

        Args:
            scope: the ASGI scope.
            path: the path of the URL.
            key: the request's valid API key, if it has one.
            limits: limits of the request.
        """
        headers: list[tuple[bytes, bytes]] = scope["headers"]
        version, num_hosts = scope["http_version"], sum(name == b"host" for name, _ in headers)
        if version not in ("1.0", "1.1") or num_hosts > 1 or (version == "1.1" and not num_hosts):
            problem = f"has {num_hosts} Host headers" if version in ("1.0", "1.1") else f"is in HTTP/{version}"
            return ApiError(
                f"the request {problem}; send HTTP/1.1 with one Host header", code="invalid_http", headers=CLOSE
            )
        size = sum(len(name) + len(value) + 4 for name, value in headers) + len(scope["raw_path"])
        if size > self._state.limits.head_bytes:
            return headers_too_large(self._state.limits.head_bytes)
        state = self._state
        has_keys = bool(state.api_keys)
        if path not in PROBES and (
            error := refuse_foreign(headers, state.host, state.allowed_hosts, state.cors_origins, has_keys)
        ):
            return error
        is_public = path in PUBLIC_PATHS or scope["method"] == "OPTIONS"
        if self._state.api_keys and key is None and not is_public:
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
        if path not in ALWAYS_AVAILABLE and limits.requests is not None and self._num_open[key] >= limits.requests:
            owner = "this API key" if key else "this server"
            return ApiError(
                f"{owner} answers at most {limits.requests} requests at once; try again when one is complete",
                status=429, code="too_many_requests", headers={"retry-after": "1"},
            )  # fmt: skip
        return None


def headers_too_large(limit: int) -> ApiError:
    """Return the error for a request whose request line and headers have more than `limit` bytes."""
    return ApiError(
        f"the request line and headers are over {limit:,} bytes; send fewer or shorter headers",
        status=431, code="too_large", headers=CLOSE,
    )  # fmt: skip


def shutting_down() -> ApiError:
    """Return the error for a request to a server that is shutting down."""
    return ApiError(
        "the server is shutting down; use another one, or try again once it is back",
        status=503, code="shutting_down", headers=CLOSE | {"retry-after": "5"},
    )  # fmt: skip
