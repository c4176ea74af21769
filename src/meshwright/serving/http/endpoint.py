"""From a request's body to an answer: the fields, the time limit, streams of events, and clients that go away."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from pydantic import BaseModel
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from meshwright.serving.http.call import Calls, too_long
from meshwright.serving.http.errors import ApiError
from meshwright.serving.http.fields import read_fields
from meshwright.serving.http.limits import read_json
from meshwright.serving.http.service import Service
from meshwright.serving.http.texts import TokenTexts

F = TypeVar("F", bound=BaseModel)

Events = AsyncGenerator[list[BaseModel], None]
"""What has been made since the last time, each an event of a stream."""

EVENT_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would hold events back.
]

SECONDS_TO_SEND = 10.0
"""How long after the time limit of a request its client may still read the answer."""


@dataclass(frozen=True, kw_only=True)
class Host:
    """What an answer is made with."""

    service: Service
    calls: Calls
    token_texts: TokenTexts


@dataclass(frozen=True, kw_only=True)
class Endpoint(Generic[F]):
    """An endpoint that reads JSON.

    Args:
        path: of its URL. what: it does, for the document of the API.
        fields: of its requests. reply: what it answers. event: what its stream is made of; None where it has none.
        answer: makes the answer, whole or as events.
    """

    path: str
    what: str
    fields: type[F]
    reply: type[BaseModel]
    answer: Callable[[Host, F], Awaitable[BaseModel | Events]]
    event: type[BaseModel] | None = None


class Handler:
    """An endpoint as Starlette calls it."""

    def __init__(self, endpoint: Endpoint[Any], host: Host) -> None:
        self._endpoint = endpoint
        self._host = host

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        service = self._host.service
        try:
            data = await read_json(Request(scope, receive), service.limits)
        except ClientDisconnect:
            return
        asked = read_fields(self._endpoint.fields, data)
        stream = _Stream(send)
        work = asyncio.ensure_future(self._answer(asked, scope, receive, stream))
        gone = asyncio.ensure_future(until_gone(receive))
        try:
            # The call itself ends with an error after the limit; this is for a client that does not read its answer.
            longest = service.limits.seconds + SECONDS_TO_SEND
            await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED, timeout=longest)
            if work.done():
                work.result()
            elif gone.done():
                self._host.calls.metrics.disconnects.inc()
            elif not stream.is_started:
                raise too_long(service.limits.seconds)
        finally:
            for task in (work, gone):
                task.cancel()
            # What the work holds in the engine is let go of before the request is over.
            await asyncio.gather(work, gone, return_exceptions=True)

    async def _answer(self, asked: Any, scope: Scope, receive: Receive, stream: _Stream) -> None:
        reply = await self._endpoint.answer(self._host, asked)
        if isinstance(reply, BaseModel):
            response = Response(reply.model_dump_json(exclude_unset=True), media_type="application/json")
            await response(scope, receive, stream.send)
        else:
            await stream.send_events(reply)


async def until_gone(receive: Receive) -> None:
    """Wait until the client closes the connection."""
    while (await receive())["type"] != "http.disconnect":
        pass


class _Stream:
    """An answer on its way to the client."""

    def __init__(self, send: Send) -> None:
        self.is_started = False
        self._send = send

    async def send(self, message: Message) -> None:
        self.is_started = True
        await self._send(message)

    async def send_events(self, events: Events) -> None:
        """Send server-sent events; an error before the first is an answer of its own, a later one the last event."""
        last = b"data: [DONE]\n\n"
        async with contextlib.aclosing(events):
            try:
                async for models in events:
                    if not self.is_started:
                        await self.send({"type": "http.response.start", "status": 200, "headers": EVENT_HEADERS})
                    body = b"".join(map(_event, models))
                    await self._send({"type": "http.response.body", "body": body, "more_body": True})
            except ApiError as error:
                if not self.is_started:
                    raise
                last = _event(error.reply)
        await self._send({"type": "http.response.body", "body": last, "more_body": False})


def _event(model: BaseModel) -> bytes:
    return b"data: " + model.model_dump_json(exclude_unset=True).encode() + b"\n\n"
