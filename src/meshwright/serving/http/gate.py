"""What every request passes first: the size of its headers, API keys, and whether the server takes requests."""

from __future__ import annotations

import hmac
import uuid

from prometheus_client import Counter
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from meshwright.serving.http.errors import CLOSE, ApiError
from meshwright.serving.http.service import ServerState

WITHOUT_KEY = {"/", "/health", "/ready"}
"""What is answered without an API key: the chat page, which sends its user's, and what supervisors ask."""

ALWAYS = {*WITHOUT_KEY, "/metrics", "/openapi.json", "/v1/models"}
"""What is answered before the server is ready and while it shuts down."""


class Gate:
    """The outermost layer of an app: refuses requests, counts answers, and gives each an id.

    requests: counts answers by endpoint and status. endpoints: all others are counted as one.
    """

    def __init__(self, app: ASGIApp, service: ServerState, requests: Counter, endpoints: frozenset[str]) -> None:
        self._app = app
        self._service = service
        self._requests = requests
        self._endpoints = endpoints
        self._keys = [key.encode() for key in service.api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or have it answered."""
        if scope["type"] != "http":
            return
        path: str = scope["path"]
        request_id = uuid.uuid4().hex.encode()

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (b"x-request-id", request_id)]
                endpoint = path if path in self._endpoints else "other"
                self._requests.labels(endpoint, str(message["status"])).inc()
            await send(message)

        refusal = self._refusal(scope, path)
        if refusal is not None:
            await refusal.response()(scope, receive, counted)
            return
        self._service.num_active += 1
        try:
            await self._app(scope, receive, counted)
        finally:
            self._service.num_active -= 1

    def _refusal(self, scope: Scope, path: str) -> ApiError | None:
        """Why a request is not let in, if it is not."""
        headers: list[tuple[bytes, bytes]] = scope["headers"]
        size = sum(len(name) + len(value) + 4 for name, value in headers) + len(scope["raw_path"])
        if size > self._service.limits.head_bytes:
            return too_long_head(self._service.limits.head_bytes)
        if path not in WITHOUT_KEY and scope["method"] != "OPTIONS" and not self._has_key(headers):
            return ApiError(
                "there is no API key of this server in the request; send it as `Authorization: Bearer KEY`",
                status=401, code="invalid_api_key", headers={"www-authenticate": "Bearer"},
            )  # fmt: skip
        if path not in ALWAYS and self._service.is_draining:
            return shutting_down()
        if path not in ALWAYS and not self._service.is_ready:
            return ApiError(
                "the model is not ready yet; ask again, /ready says when it is",
                status=503, code="not_ready", headers={"retry-after": "5"},
            )  # fmt: skip
        return None

    def _has_key(self, headers: list[tuple[bytes, bytes]]) -> bool:
        if not self._keys:
            return True
        said = next((value for name, value in headers if name == b"authorization"), b"")
        scheme, _, key = said.partition(b" ")
        # Every key is compared, each in constant time: how long it takes says nothing of what they are.
        matches = [hmac.compare_digest(key.strip(), known) for known in self._keys]
        return scheme.lower() == b"bearer" and any(matches)


def too_long_head(limit: int) -> ApiError:
    """The error of a request whose first line and headers are too long."""
    return ApiError(
        f"the request's first line and headers are over {limit:,} bytes; send fewer or shorter ones",
        status=431, code="too_large", headers=CLOSE,
    )  # fmt: skip


def shutting_down() -> ApiError:
    """The error of a request that a server which is shutting down does not answer."""
    return ApiError(
        "the server is shutting down; ask another one, or this one once it is back",
        status=503, code="shutting_down", headers=CLOSE | {"retry-after": "5"},
    )  # fmt: skip
