"""The reverse proxy in front of several replicas; it retries on another replica until a response has started."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any, Protocol

import httpx
import pydantic_core
from prometheus_client import CollectorRegistry, Counter
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from meshwright.serving.front.metrics import merged_metrics
from meshwright.serving.front.routing import Router, prefix_blocks
from meshwright.serving.http.app import ENDPOINTS
from meshwright.serving.http.endpoint import wait_for_disconnect
from meshwright.serving.http.errors import ApiError
from meshwright.serving.http.metrics import CONTENT_TYPE
from meshwright.serving.http.middleware import LIMITS, add_middleware
from meshwright.serving.http.request_body import read_body
from meshwright.serving.http.service import ServerState

RETRY_STATUSES = (429, 503)
"""Statuses of a replica's response after which the request is sent to another replica."""

MAX_LOST_REPLICAS = 2
"""If this many replicas died while they answered a request, it gets an error, because it may be the cause."""

HOP_HEADERS = frozenset(
    (b"connection", b"content-length", b"date", b"keep-alive", b"server", b"transfer-encoding", b"x-request-id")
)
"""Headers of a replica's response that are not forwarded: they concern its connection, or the proxy sets its own."""


class Replica(Protocol):
    """A server behind the proxy."""

    @property
    def url(self) -> str | None:
        """The replica's address; None while it accepts no requests."""
        ...

    @property
    def starts(self) -> int:
        """How many times the replica was started. If it increases, the replica has lost its prefix cache."""
        ...


class Front:
    """The reverse proxy between clients and replicas.

    Args:
        state: API keys, limits and readiness of the proxy.
        replicas: the replicas.
        key: API key that the proxy sends to the replicas, unless it forwards the client's key. Replicas also accept the
            keys in `state`.
    """

    def __init__(self, state: ServerState, replicas: Sequence[Replica], key: str) -> None:
        self._state, self._replicas, self._router = state, replicas, Router(len(replicas))
        self._starts = [replica.starts for replica in replicas]
        self._tasks = set[asyncio.Task[None]]()
        self._error: ApiError | None = None
        self.registry = CollectorRegistry()
        self._requests = Counter(
            "meshwright_front_requests", "Responses by endpoint and status", ("endpoint", "status"),
            registry=self.registry,
        )  # fmt: skip
        self._retries = Counter(
            "meshwright_front_retries", "Requests that were sent to another replica, by reason", ("why",),
            registry=self.registry,
        )  # fmt: skip
        self._blocks = Counter(
            "meshwright_front_prefix_blocks", "Blocks of prompts, by whether their replica had them cached", ("known",),
            registry=self.registry,
        )  # fmt: skip
        # trust_env=False: the environment's proxies do not apply to connections on this machine.
        self._client = httpx.AsyncClient(
            headers={"authorization": f"Bearer {key}", "accept-encoding": "identity"},
            timeout=httpx.Timeout(None, connect=5.0),
            transport=_Transport(limits=httpx.Limits(max_connections=None, max_keepalive_connections=256)),
            trust_env=False,
        )

    def app(self) -> ASGIApp:
        """Return the proxy as an ASGI app, with its middleware."""
        paths = frozenset((*(endpoint.path for endpoint in ENDPOINTS), "/", "/v1/models", "/openapi.json"))
        return add_middleware(self._handle, self._state, self._requests, paths | {"/health", "/ready", "/metrics"})

    async def close(self) -> None:
        """Close the connections to the replicas."""
        await self._client.aclose()

    def fail(self, error: ApiError) -> None:
        """End all open requests with an error."""
        self._error = error
        for task in list(self._tasks):
            task.cancel()

    async def _handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        path, response = scope["path"], _ResponseSender(scope, receive, send)
        try:
            if path == "/health":
                await response.respond(PlainTextResponse("ok\n"))
            elif path == "/ready":
                is_ready = bool(self._ready()) and self._state.is_ready and not self._state.is_draining
                await response.respond(
                    PlainTextResponse("ready\n" if is_ready else "not ready\n", 200 if is_ready else 503)
                )
            elif path == "/metrics":
                await response.respond(await self._metrics())
            else:
                request = Request(scope, receive)
                body = await read_body(request, scope[LIMITS])
                await self._until_disconnect(self._forward(request, body, response), receive, response)
        except ClientDisconnect:
            return
        except ApiError as error:
            await response.respond(error.response())

    async def _until_disconnect(
        self, work: Coroutine[Any, Any, None], receive: Receive, response: _ResponseSender
    ) -> None:
        """Run a coroutine that answers a request; cancel it if the client disconnects."""
        task = asyncio.ensure_future(work)
        disconnect = asyncio.ensure_future(wait_for_disconnect(receive))
        self._tasks.add(task)
        try:
            await asyncio.wait((task, disconnect), return_when=asyncio.FIRST_COMPLETED)
            if task.cancelled() and self._error is not None:
                await response.fail(self._error)
            elif task.done():
                task.result()
        finally:
            self._tasks.discard(task)
            for one in (task, disconnect):
                one.cancel()
            # Wait until the connection to the replica is closed, which ends its work on the request.
            await asyncio.gather(task, disconnect, return_exceptions=True)

    def _ready(self) -> list[int]:
        """Return the numbers of the replicas that accept requests. Restarted replicas count as having empty caches."""
        for number, replica in enumerate(self._replicas):
            if replica.starts != self._starts[number]:
                self._starts[number] = replica.starts
                self._router.forget(number)
        return [number for number, replica in enumerate(self._replicas) if replica.url is not None]

    async def _forward(self, request: Request, body: bytes, response: _ResponseSender) -> None:
        """Send a request to replicas until one answers it."""
        blocks, tried, num_lost = _prompt_blocks(body), set[int](), 0
        while untried := [number for number in self._ready() if number not in tried]:
            number = self._router.choose(blocks, untried)
            num_cached = self._router.num_cached(number, blocks)
            tried.add(number)
            try:
                with self._router.open_request(number, blocks):
                    if await self._send(number, request, body, response):
                        self._blocks.labels("yes").inc(num_cached)
                        self._blocks.labels("no").inc(len(blocks) - num_cached)
                        return
                self._retries.labels("busy").inc()
            except httpx.TransportError as error:
                if response.is_started:
                    await response.fail(_replica_lost(number))
                    return
                num_lost += not isinstance(error, httpx.ConnectError)
                if num_lost == MAX_LOST_REPLICAS:
                    break
                self._retries.labels("lost").inc()
        if response.rejection is not None:
            await response.respond(response.rejection)
            return
        if tried:
            raise _replica_lost(number)
        raise ApiError(
            "no replica accepts requests now; try again, /ready answers 200 when one does",
            status=503, code="not_ready", headers={"retry-after": "5"},
        )  # fmt: skip

    async def _send(self, number: int, request: Request, body: bytes, response: _ResponseSender) -> bool:
        """Forward a request to replica `number`, and its response to the client.

        Returns:
            False if the replica rejects the request (`RETRY_STATUSES`); then nothing was sent to the client.
        """
        url, query = self._replicas[number].url, request.url.query
        if url is None:
            return False
        request_headers = {n: request.headers[n] for n in ("content-type", "accept") if n in request.headers}
        if self._state.api_keys and "authorization" in request.headers:
            # The replicas know the clients' keys, and apply each key's limits.
            request_headers["authorization"] = request.headers["authorization"]
        target = httpx.URL(url).copy_with(raw_path=request.scope["raw_path"] + (f"?{query}".encode() if query else b""))
        async with self._client.stream(request.method, target, content=body, headers=request_headers) as reply:
            headers = [(name.lower(), value) for name, value in reply.headers.raw if name.lower() not in HOP_HEADERS]
            if reply.headers.get("content-type", "").startswith("text/event-stream"):
                async for part in reply.aiter_raw():
                    await response.send(reply.status_code, headers, part)
                await response.end()
                return True
            # Send nothing before the reply is complete: until then another replica can still answer.
            whole = Response(b"".join([part async for part in reply.aiter_raw()]), reply.status_code)
            whole.raw_headers = [*headers, (b"content-length", str(len(whole.body)).encode())]
        if reply.status_code in RETRY_STATUSES:
            response.rejection = whole
            return False
        await response.respond(whole)
        return True

    async def _metrics(self) -> Response:
        """Return the metrics of the proxy and of all ready replicas."""

        async def scrape(number: int) -> str:
            try:
                return (await self._client.get(f"{self._replicas[number].url}/metrics", timeout=5.0)).text
            except httpx.HTTPError:
                return ""

        ready = self._ready()
        texts = await asyncio.gather(*map(scrape, ready))
        num_open = {number: self._router.num_open(number) for number in range(len(self._replicas))}
        body = merged_metrics(self.registry, dict(zip(ready, texts, strict=True)), num_open)
        return Response(body, media_type=CONTENT_TYPE)


class _Transport(httpx.AsyncHTTPTransport):
    """Connections to replicas. A connection that closes while it is opened raises `ConnectError`, like any failure."""

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send a request."""
        try:
            return await super().handle_async_request(request)
        except AttributeError as error:  # anyio 4.16 asks a closed socket for its peer.
            raise httpx.ConnectError(f"the connection was closed while it was opened: {error}") from error


class _ResponseSender:
    """Sends a response to the client.

    Attributes:
        is_started: whether a part of the response was sent.
        rejection: the response of the replica that rejected the request last.
    """

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._scope, self._receive, self._send = scope, receive, send
        self.is_started = False
        self.rejection: Response | None = None

    async def respond(self, response: Response) -> None:
        """Send a complete response."""
        self.is_started = True
        await response(self._scope, self._receive, self._send)

    async def send(self, status: int, headers: list[tuple[bytes, bytes]], part: bytes) -> None:
        """Send a part of a streamed response, with the status and headers before the first part."""
        if not self.is_started:
            self.is_started = True
            await self._send({"type": "http.response.start", "status": status, "headers": headers})
        await self._send({"type": "http.response.body", "body": part, "more_body": True})

    async def end(self) -> None:
        """End a streamed response."""
        if self.is_started:
            await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def fail(self, error: ApiError) -> None:
        """Send an error; if a streamed response has started, as its last event."""
        if not self.is_started:
            await self.respond(error.response())
            return
        await self._send({"type": "http.response.body", "body": b"data: " + error.json() + b"\n\n", "more_body": False})


def _prompt_blocks(body: bytes) -> tuple[bytes, ...]:
    """Return the `prefix_blocks` of a request's body; empty for invalid JSON, for which the replica sends the error."""
    try:
        fields = pydantic_core.from_json(body)
    except ValueError:
        return ()
    return prefix_blocks(fields) if isinstance(fields, dict) else ()


def _replica_lost(number: int) -> ApiError:
    return ApiError(f"replica {number} was lost before its answer was complete; try again", status=503, code="lost",
                    headers={"retry-after": "1"})  # fmt: skip
