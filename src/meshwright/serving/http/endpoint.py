"""An endpoint that reads JSON: validation, the time limit, server-sent events, and clients that disconnect."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Generic, TypeVar

from pydantic import BaseModel
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from meshwright.serving.http.async_engine import AsyncEngine, answer_timeout
from meshwright.serving.http.errors import ApiError, internal_error
from meshwright.serving.http.middleware import API_KEY, LIMITS, REQUEST_ID
from meshwright.serving.http.openai.logprobs import TokenDecoder
from meshwright.serving.http.request_body import check_content_type, parse_request, read_body
from meshwright.serving.http.service import Service

B = TypeVar("B", bound=BaseModel)

EventBatches = AsyncGenerator[list[BaseModel], None]
"""Server-sent events of a response, in batches. The events of a batch are sent in one write."""

EVENT_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # Keep nginx from buffering the events.
]

SECONDS_TO_SEND = 10.0
"""Seconds after the time limit of a request in which its client may still read the answer."""


@dataclass(frozen=True, kw_only=True)
class AppState:
    """Objects that the handlers of an app share.

    Args:
        service: the engine, tokenizer and limits.
        async_engine: the asyncio wrapper of the engine.
        token_decoder: decodes single tokens, for log probabilities.
    """

    service: Service
    async_engine: AsyncEngine
    token_decoder: TokenDecoder


@dataclass(frozen=True, kw_only=True)
class Endpoint(Generic[B]):
    """A POST endpoint that reads JSON.

    Args:
        path: path of its URL.
        summary: short description for the OpenAPI document.
        request: pydantic model of the request body.
        response: pydantic model of the response body.
        handler: returns the response, or the events of a streamed response, for a validated request body.
        chunk: pydantic model of a streamed response's events; None for an endpoint that does not stream.
        has_named_events: whether each event is sent with its type as name, and no `[DONE]` event at the end.
    """

    path: str
    summary: str
    request: type[B]
    response: type[BaseModel]
    handler: Callable[[AppState, B], Awaitable[BaseModel | EventBatches]]
    chunk: type[BaseModel] | None = None
    has_named_events: bool = False


class EndpointApp:
    """An endpoint as an ASGI app, for Starlette's `Route`."""

    def __init__(self, endpoint: Endpoint[Any], state: AppState) -> None:
        self._endpoint = endpoint
        self._state = state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request; stop working on it when the client disconnects."""
        limits = scope[LIMITS]
        request = Request(scope, receive)
        check_content_type(request)
        try:
            data = await read_body(request, limits)
        except ClientDisconnect:
            return
        # A copy with this request's values. Handlers never read the server's state (ready, draining) from it.
        service = replace(
            self._state.service, limits=limits, api_key=scope[API_KEY], body_size=len(data),
            client=request.client.host if request.client else "",
        )  # fmt: skip
        body = await service.run(partial(parse_request, self._endpoint.request, data, limits))
        if (adapter := service.find_adapter(getattr(body, "model", None))) is not None:
            service = replace(service, adapter=adapter, model=adapter.name)
        state = replace(self._state, service=service)
        response = _ResponseSender(send, scope[REQUEST_ID])
        work = asyncio.ensure_future(self._answer(state, body, scope, receive, response))
        disconnect = asyncio.ensure_future(wait_for_disconnect(receive))
        try:
            # `OutputStream` enforces the limit; this timeout is for a client that does not read its answer.
            timeout = limits.seconds + SECONDS_TO_SEND
            await asyncio.wait((work, disconnect), return_when=asyncio.FIRST_COMPLETED, timeout=timeout)
            if work.done():
                work.result()
            elif disconnect.done():
                self._state.async_engine.metrics.disconnects.inc()
            elif not response.is_started:
                raise answer_timeout(limits.seconds)
        finally:
            for task in (work, disconnect):
                task.cancel()
            # Wait until the cancelled work has aborted its prompts in the engine.
            await asyncio.gather(work, disconnect, return_exceptions=True)

    async def _answer(
        self, state: AppState, body: Any, scope: Scope, receive: Receive, response: _ResponseSender
    ) -> None:
        answer = await self._endpoint.handler(state, body)
        if isinstance(answer, BaseModel):
            whole = Response(answer.model_dump_json(exclude_unset=True), media_type="application/json")
            await whole(scope, receive, response.send)
        else:
            await response.send_events(answer, has_names=self._endpoint.has_named_events)


async def wait_for_disconnect(receive: Receive) -> None:
    """Wait until the client closes the connection."""
    while (await receive())["type"] != "http.disconnect":
        pass


class _ResponseSender:
    """Sends a response, and records whether it has started."""

    def __init__(self, send: Send, request_id: str) -> None:
        self.is_started = False
        self._send = send
        self._request_id = request_id

    async def send(self, message: Message) -> None:
        self.is_started = True
        await self._send(message)

    async def send_events(self, batches: EventBatches, *, has_names: bool) -> None:
        """Send server-sent events. An error before the first event is raised; a later error is sent as the last event.

        has_names: as `Endpoint.has_named_events`.
        """
        last = b"" if has_names else b"data: [DONE]\n\n"
        async with contextlib.aclosing(batches):
            try:
                async for events in batches:
                    if not self.is_started:
                        await self.send({"type": "http.response.start", "status": 200, "headers": EVENT_HEADERS})
                    body = b"".join(_event(event, has_name=has_names) for event in events)
                    await self._send({"type": "http.response.body", "body": body, "more_body": True})
            except ApiError as error:
                if not self.is_started:
                    raise
                last = _event(error.body)
            except Exception as error:
                if not self.is_started:
                    raise
                last = _event(internal_error(error, self._request_id).body)
        await self._send({"type": "http.response.body", "body": last, "more_body": False})


def _event(model: BaseModel, *, has_name: bool = False) -> bytes:
    name = f"event: {getattr(model, 'type', 'error')}\n".encode() if has_name else b""
    return name + b"data: " + model.model_dump_json(exclude_unset=True).encode() + b"\n\n"
