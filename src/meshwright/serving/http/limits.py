"""What one client may ask for, and the body of a request within it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import pydantic_core
from starlette.requests import Request

from meshwright.errors import MeshwrightError
from meshwright.field_types import check_fields
from meshwright.serving.http.errors import CLOSE, ApiError, short

DISCARD_FACTOR = 16
"""How much of a body beyond its limit is read and thrown away, in limits, before the connection is closed: a client
that is still sending reads no answer."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What one request may have. The engine has the length of its queue.

    Args:
        body_bytes: of its body. body_seconds: until that has come. head_bytes: of its first line and headers.
            head_seconds: until these have come.
        seconds: until it is answered. unread_seconds: in which its client reads nothing of its answer.
        prompts: in one request. prompts_at_once: of one request in the engine.
        texts: of one prompt (`n`). max_tokens: of each text; None for what the model's context leaves.
        stop_texts: that end a text. stop_characters: of each.

    """

    body_bytes: int = 4 << 20
    body_seconds: float = 30.0
    head_bytes: int = 32 << 10
    head_seconds: float = 10.0
    seconds: float = 600.0
    unread_seconds: float = 60.0
    prompts: int = 1024
    prompts_at_once: int = 128
    texts: int = 16
    max_tokens: int | None = None
    stop_texts: int = 16
    stop_characters: int = 256

    def __post_init__(self) -> None:
        check_fields(self)
        for name, value in vars(self).items():
            if value is not None and not value > 0:
                raise MeshwrightError(f"the limit {name} is {value}; it is above 0")


async def read_json(request: Request, limits: Limits) -> dict[str, Any]:
    """The object in a request's body.

    Raises:
        ApiError: another type of content, a body that is too long or too slow, or that is no JSON object.
    """
    content_type = request.headers.get("content-type", "")
    if content_type.split(";")[0].strip().lower() != "application/json":
        # A page of another origin can send other types without asking the browser's leave (CORS).
        raise ApiError(
            f"content-type is {content_type[:60]!r}; it is application/json", status=415, code="unsupported_media_type"
        )
    try:
        data = pydantic_core.from_json(await read_body(request, limits), allow_inf_nan=False)
    except ValueError as error:
        raise ApiError(f"the body is no JSON: {error}", code="invalid_json") from None
    if not isinstance(data, dict):
        raise ApiError(f"the body is {short(data)}; it is an object")
    return data


async def read_body(request: Request, limits: Limits) -> bytes:
    """A request's body.

    Raises:
        ApiError: one that is too long or too slow.
    """
    try:
        async with asyncio.timeout(limits.body_seconds):
            return await _read(request, limits.body_bytes)
    except TimeoutError:
        raise ApiError(
            f"the body had not come after {limits.body_seconds:g} s; send it faster", status=408, headers=CLOSE
        ) from None


async def _read(request: Request, limit: int) -> bytes:
    """The body, counted as it comes: a client may say nothing of its length, or what is not so."""
    said = request.headers.get("content-length", "")
    expected = int(said) if said.isdigit() else 0
    parts, size = [], 0
    if expected <= limit * DISCARD_FACTOR:
        async for part in request.stream():
            size += len(part)
            if size <= limit:
                parts.append(part)
            else:
                parts.clear()
            if size > limit * DISCARD_FACTOR:
                break
    if max(size, expected) > limit:
        raise ApiError(
            f"the body has {'' if expected or size <= limit * DISCARD_FACTOR else 'over '}{max(size, expected):,}"
            f" bytes; this server reads at most {limit:,}",
            status=413, code="too_large", headers=CLOSE,
        )  # fmt: skip
    return b"".join(parts)
