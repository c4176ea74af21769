"""The app of a front: each request goes to a replica, and to another one where that dies before anything was sent."""

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
from meshwright.serving.http.app import ENDPOINTS, gated
from meshwright.serving.http.endpoint import until_gone
from meshwright.serving.http.errors import ApiError
from meshwright.serving.http.limits import read_body
from meshwright.serving.http.service import ServerState

ELSEWHERE = (429, 503)
"""What a replica answers that another may have room for."""

MOST_LOST = 2
"""A request that was with so many replicas when they died is answered with an error: it may have ended them."""

OWN_HEADERS = frozenset(
    (b"connection", b"content-length", b"date", b"keep-alive", b"server", b"transfer-encoding", b"x-request-id")
)
"""Headers of answers that are about a connection or are the front's own."""


class Replica(Protocol):
    """A server behind the front. Its url is None while it takes no requests."""

    @property
    def url(self) -> str | None:
        """Where it answers."""
        ...

    @property
    def starts(self) -> int:
        """How often it was started."""
        ...


class Front:
    """What is between clients and replicas.

    Args:
        state: of the front. key: the API key of the replicas.
    """

    def __init__(self, state: ServerState, replicas: Sequence[Replica], key: str) -> None:
        self._state, self._replicas, self._router = state, replicas, Router(len(replicas))
        self._starts = [replica.starts for replica in replicas]
        self._open = set[asyncio.Task[None]]()
        self._error: ApiError | None = None
        self.registry = CollectorRegistry()
        self._requests = Counter(
            "meshwright_front_requests", "Answers by endpoint and status", ("endpoint", "status"),
            registry=self.registry,
        )  # fmt: skip
        self._retries = Counter(
            "meshwright_front_retries", "Requests that were sent to another replica, by why", ("why",),
            registry=self.registry,
        )  # fmt: skip
        self._blocks = Counter(
            "meshwright_front_prefix_blocks", "Blocks of prompts, by whether their replica had read them", ("known",),
            registry=self.registry,
        )  # fmt: skip
        # Of proxies in the environment nothing is meant for this machine.
        self._client = httpx.AsyncClient(
            headers={"authorization": f"Bearer {key}", "accept-encoding": "identity"},
            timeout=httpx.Timeout(None, connect=5.0),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=256),
            trust_env=False,
        )

    def app(self) -> ASGIApp:
        """The front as an app."""
        paths = frozenset((*(endpoint.path for endpoint in ENDPOINTS), "/", "/v1/models", "/openapi.json"))
        return gated(self._answer, self._state, self._requests, paths | {"/health", "/ready", "/metrics"})

    def fail(self, error: ApiError) -> None:
        """End all requests with an error."""
        self._error = error
        for task in list(self._open):
            task.cancel()

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        path, answer = scope["path"], _Answer(scope, receive, send)
        try:
            if path == "/health":
                await answer.respond(PlainTextResponse("ok\n"))
            elif path == "/ready":
                is_ready = bool(self._ready()) and self._state.is_ready and not self._state.is_draining
                await answer.respond(
                    PlainTextResponse("ready\n" if is_ready else "not ready\n", 200 if is_ready else 503)
                )
            elif path == "/metrics":
                await answer.respond(await self._metrics())
            else:
                request = Request(scope, receive)
                body = await read_body(request, self._state.limits)
                await self._while_there(self._forward(request, body, answer), receive, answer)
        except ClientDisconnect:
            return
        except ApiError as error:
            await answer.respond(error.response())

    async def _while_there(self, work: Coroutine[Any, Any, None], receive: Receive, answer: _Answer) -> None:
        """Work for a client until that is done, or the client goes away."""
        task = asyncio.ensure_future(work)
        gone = asyncio.ensure_future(until_gone(receive))
        self._open.add(task)
        try:
            await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
            if task.cancelled() and self._error is not None:
                await answer.fail(self._error)
            elif task.done():
                task.result()
        finally:
            self._open.discard(task)
            for one in (task, gone):
                one.cancel()
            # A connection to a replica is closed, which ends its work, before the request is over.
            await asyncio.gather(task, gone, return_exceptions=True)

    def _ready(self) -> list[int]:
        """The replicas that take requests; one that was started again has read nothing."""
        for number, replica in enumerate(self._replicas):
            if replica.starts != self._starts[number]:
                self._starts[number] = replica.starts
                self._router.forget(number)
        return [number for number, replica in enumerate(self._replicas) if replica.url is not None]

    async def _forward(self, request: Request, body: bytes, answer: _Answer) -> None:
        """Have a replica answer."""
        blocks, tried, num_lost = _blocks(body), set[int](), 0
        while left := [number for number in self._ready() if number not in tried]:
            number = self._router.choose(blocks, left)
            known = self._router.num_known(number, blocks)
            tried.add(number)
            try:
                with self._router.answering(number, blocks):
                    if await self._send(number, request, body, answer):
                        self._blocks.labels("yes").inc(known)
                        self._blocks.labels("no").inc(len(blocks) - known)
                        return
                self._retries.labels("busy").inc()
            except httpx.TransportError as error:
                if answer.is_started:
                    await answer.fail(_lost(number))
                    return
                num_lost += not isinstance(error, httpx.ConnectError)
                if num_lost == MOST_LOST:
                    break
                self._retries.labels("lost").inc()
        if answer.refusal is not None:
            await answer.respond(answer.refusal)
            return
        raise _lost(number) if tried else _none()

    async def _send(self, number: int, request: Request, body: bytes, answer: _Answer) -> bool:
        """Pass a request to a replica and its answer back; False, and nothing is sent, where it takes no request."""
        url, query = self._replicas[number].url, request.url.query
        if url is None:
            return False
        headers = {name: request.headers[name] for name in ("content-type", "accept") if name in request.headers}
        target = httpx.URL(url).copy_with(raw_path=request.scope["raw_path"] + (f"?{query}".encode() if query else b""))
        async with self._client.stream(request.method, target, content=body, headers=headers) as found:
            kept = [(name.lower(), value) for name, value in found.headers.raw if name.lower() not in OWN_HEADERS]
            if found.headers.get("content-type", "").startswith("text/event-stream"):
                async for part in found.aiter_raw():
                    await answer.send(found.status_code, kept, part)
                await answer.end()
                return True
            # Nothing of it is sent before it is whole: until then another replica may answer.
            response = Response(b"".join([part async for part in found.aiter_raw()]), found.status_code)
            response.raw_headers = [*kept, (b"content-length", str(len(response.body)).encode())]
        if found.status_code in ELSEWHERE:
            answer.refusal = response
            return False
        await answer.respond(response)
        return True

    async def _metrics(self) -> Response:
        """The numbers of the front, and of all replicas that answer."""

        async def text(number: int) -> str:
            try:
                return (await self._client.get(f"{self._replicas[number].url}/metrics", timeout=5.0)).text
            except httpx.HTTPError:
                return ""

        ready = self._ready()
        texts = await asyncio.gather(*map(text, ready))
        opened = {number: self._router.num_open(number) for number in range(len(self._replicas))}
        body = merged_metrics(self.registry, dict(zip(ready, texts, strict=True)), opened)
        return Response(body, media_type="text/plain; version=0.0.4; charset=utf-8")


class _Answer:
    """An answer on its way to a client. refusal: what a replica said that took no request."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._scope, self._receive, self._send = scope, receive, send
        self.is_started = False
        self.refusal: Response | None = None

    async def respond(self, response: Response) -> None:
        """Send a whole answer."""
        self.is_started = True
        await response(self._scope, self._receive, self._send)

    async def send(self, status: int, headers: list[tuple[bytes, bytes]], part: bytes) -> None:
        """Send a part of a stream."""
        if not self.is_started:
            self.is_started = True
            await self._send({"type": "http.response.start", "status": status, "headers": headers})
        await self._send({"type": "http.response.body", "body": part, "more_body": True})

    async def end(self) -> None:
        """End a stream."""
        if self.is_started:
            await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def fail(self, error: ApiError) -> None:
        """Answer with an error; in a stream that has begun as its last event."""
        if not self.is_started:
            await self.respond(error.response())
            return
        await self._send({"type": "http.response.body", "body": b"data: " + error.json() + b"\n\n", "more_body": False})


def _blocks(body: bytes) -> tuple[bytes, ...]:
    """Of a request's prompt; none of what is no JSON, which a replica says."""
    try:
        fields = pydantic_core.from_json(body)
    except ValueError:
        return ()
    return prefix_blocks(fields) if isinstance(fields, dict) else ()


def _lost(number: int) -> ApiError:
    return ApiError(f"replica {number} was lost before its answer was done; ask again", status=503, code="lost",
                    headers={"retry-after": "1"})  # fmt: skip


def _none() -> ApiError:
    return ApiError(
        "no replica takes requests now; ask again, /ready says when one does",
        status=503, code="not_ready", headers={"retry-after": "5"},
    )  # fmt: skip
