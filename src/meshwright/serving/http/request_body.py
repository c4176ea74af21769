"""Read the body of an HTTP request into a validated pydantic model: size and time limits, JSON, fields.

An unknown field is an error whose message suggests the nearest known field. So is a field of OpenAI's API that would
change the answer and is not implemented. Only the fields of `IgnoredFields`, which concern a client's OpenAI account
and never change an answer, are accepted without effect. A field that is null counts as left out.
"""

from __future__ import annotations

import asyncio
import difflib
import json
from collections.abc import Sequence
from typing import Annotated, Any, TypeVar

import pydantic_core
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError
from starlette.requests import Request

from meshwright.serving.http.errors import CLOSE, ApiError
from meshwright.serving.http.service import RequestLimits

M = TypeVar("M", bound=BaseModel)

DISCARD_FACTOR = 16
"""A body over the limit is still read and discarded, up to this many times the limit, before the error is sent.

A client that is still sending would not read the error.
"""

UNKNOWN_FIELD = "unknown_field"
"""Error code for a field that this server does not know."""

# Lists stop at their first invalid item (fail_fast): a list of a million would otherwise give a million errors.
Token = Annotated[int, Field(ge=0, lt=2**31)]
Tokens = Annotated[list[Token], Field(fail_fast=True)]
Texts = Annotated[list[str], Field(fail_fast=True)]


class RequestModel(BaseModel):
    """Base of request models: no unknown fields, no coercion between types (strict), no NaN or infinity."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _check_names(cls, data: Any) -> Any:
        """Return the fields without null ones. Refuse only the first unknown field, where pydantic would list all."""
        if not isinstance(data, dict):
            return data
        known = {field.alias or name for name, field in cls.model_fields.items()}
        fields = {name: value for name, value in data.items() if value is not None}
        for name in fields:
            if name not in known:
                near = difflib.get_close_matches(name[:100], known, n=1)
                names = ", ".join(sorted(known))
                others = f"its fields are {names}" if len(names) < 400 else f"/openapi.json has its {len(known)} fields"
                hint = f"did you mean {near[0]}?" if near else others
                raise PydanticCustomError(UNKNOWN_FIELD, "no field", {"name": name, "hint": hint})
        return fields


class IgnoredFields(RequestModel):
    """Fields that OpenAI's clients send for OpenAI's own accounting: accepted without effect."""

    user: str | None = Field(None, description="text; without effect")
    metadata: dict[str, Any] | None = Field(None, description="an object; without effect")
    store: bool | None = Field(None, description="true or false; without effect")
    service_tier: str | None = Field(None, description="text; without effect")
    safety_identifier: str | None = Field(None, description="text; without effect")
    prompt_cache_key: str | None = Field(None, description="text; without effect: prefixes are always cached")
    prompt_cache_retention: str | None = Field(None, description="text; without effect")


def check_content_type(request: Request) -> None:
    """Raise an `ApiError` if the content type of a request is not JSON."""
    content_type = request.headers.get("content-type", "")
    if content_type.split(";")[0].strip().lower() != "application/json":
        # A page of another origin can send other content types without a CORS preflight.
        raise ApiError(
            f"content-type is {content_type[:60]!r}; it must be application/json",
            status=415, code="unsupported_media_type",
        )  # fmt: skip


def parse_request(model: type[M], body: bytes, limits: RequestLimits) -> M:
    """Parse a body as JSON, validate its fields, and return it as `model`.

    Raises:
        ApiError: the body is not a JSON object, has more fields or values than the limits, or a field is unknown,
            missing or invalid.
    """
    _check_structure(body, limits)
    try:
        data = pydantic_core.from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise ApiError(f"the body is not valid JSON: {error}", code="invalid_json") from None
    if not isinstance(data, dict):
        raise ApiError(f"the body is {_abbreviated(data)}; it must be a JSON object")
    return validate_request(model, data)


def _check_structure(body: bytes, limits: RequestLimits) -> None:
    """Raise an `ApiError` if a body has more strings, fields or list items than the limits, counted by punctuation.

    Parsing such a body would take long.
    """
    most = {"strings": 4 * limits.body_fields, "fields": limits.body_fields, "values": limits.body_values}
    if all(body.count(mark) <= most[what] for what, mark in (("strings", b'"'), ("fields", b":"), ("values", b","))):
        return
    plain = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    counts = {"strings": plain.count(b'"') // 2}
    if counts["strings"] <= most["strings"]:
        outside = b"".join(plain.split(b'"')[::2])
        counts |= {"fields": outside.count(b":"), "values": outside.count(b",") + outside.count(b":")}
    for what, count in counts.items():
        if count > most[what]:
            raise ApiError(f"the body has {count:,} {what}; this server reads at most {most[what]:,}", code="too_large")


async def read_body(request: Request, limits: RequestLimits) -> bytes:
    """Return the body of a request.

    Raises:
        ApiError: the body is too large or arrives too slowly.
    """
    try:
        async with asyncio.timeout(limits.body_seconds):
            return await _read_at_most(request, limits.body_bytes)
    except TimeoutError:
        raise ApiError(
            f"the body was not complete after {limits.body_seconds:g} s; send it faster", status=408, headers=CLOSE
        ) from None


async def _read_at_most(request: Request, limit: int) -> bytes:
    """Read a body; raise an `ApiError` if it has more than `limit` bytes. content-length may be missing or wrong."""
    header = request.headers.get("content-length", "")
    declared = int(header) if header.isdigit() else 0
    parts, size = [], 0
    if declared <= limit * DISCARD_FACTOR:
        async for part in request.stream():
            size += len(part)
            if size <= limit:
                parts.append(part)
            else:
                parts.clear()
            if size > limit * DISCARD_FACTOR:
                break
    if max(size, declared) > limit:
        at_least = "" if declared or size <= limit * DISCARD_FACTOR else "over "
        raise ApiError(
            f"the body has {at_least}{max(size, declared):,} bytes; this server reads at most {limit:,}",
            status=413, code="too_large", headers=CLOSE,
        )  # fmt: skip
    return b"".join(parts)


def validate_request(model: type[M], data: dict[str, Any]) -> M:
    """Return the fields of a request body (`data`), validated, as `model`.

    Raises:
        ApiError: a field is unknown, missing or invalid.
    """
    try:
        return model.model_validate(data)
    except ValidationError as error:
        raise _validation_error(error, model, data) from None


def _validation_error(error: ValidationError, model: type[BaseModel], data: dict[str, Any]) -> ApiError:
    """Convert pydantic's errors to one `ApiError`: about the first unknown field, else about the first invalid one."""
    errors = error.errors(include_url=False, include_input=False)
    unknown = next((each for each in errors if each["type"] == UNKNOWN_FIELD), None)
    if unknown is not None:
        context = unknown.get("ctx", {})
        name = _show_path((*_path(data, unknown["loc"]), context["name"][:100]))
        return ApiError(f"{name} is not a field of this request; {context['hint']}", param=name, code=UNKNOWN_FIELD)
    first = errors[0]["loc"][:1]
    deepest = max((each for each in errors if each["loc"][:1] == first), key=lambda each: len(_path(data, each["loc"])))
    path, location = _path(data, deepest["loc"]), deepest["loc"]
    field = model.model_fields.get(str(location[0])) if location else None
    # For a field with a union type, pydantic reports an error for each member of the union.
    is_union = len(location) > 1 and location[:2] != path[:2]
    if field is not None and field.description and (len(path) == 1 or is_union):
        path, expected = path[:1], f"it must be {field.description}"
    else:
        expected = deepest["msg"].replace("Input should", "it should").replace("Value error, ", "")
        expected = expected.replace("Field required", "it is required")
    name = _show_path(path)
    if deepest["type"] == "missing" and not is_union:
        return ApiError(f"{name} is missing; {expected}", param=name)
    return ApiError(f"{name} is {_abbreviated(_value_at(data, path))}; {expected}", param=name)


def _path(data: Any, location: Sequence[int | str]) -> tuple[int | str, ...]:
    """Return the keys and indices in `data` that lead to an error.

    location: pydantic's location of the error, which also has the names of union members.
    """
    path: list[int | str] = []
    for number, key in enumerate(location):
        if isinstance(data, dict) and (key in data or number == len(location) - 1):
            data = data.get(key)
        elif isinstance(data, list) and isinstance(key, int) and key < len(data):
            data = data[key]
        else:
            continue
        path.append(key)
    return tuple(path)


def _value_at(data: Any, path: Sequence[int | str]) -> Any:
    for key in path:
        data = data.get(key) if isinstance(data, dict) else data[key] if isinstance(key, int) else None
    return data


def _show_path(path: Sequence[int | str]) -> str:
    """Return the path of a field as text, such as messages[0].role."""
    text = "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in path)
    return text.removeprefix(".") or "the body"


def _abbreviated(value: Any) -> str:
    """Return a value of a request for an error message, in about 60 characters."""
    if isinstance(value, list):
        return f"a list of {len(value)}" if value else "an empty list"
    if isinstance(value, dict):
        return f"an object of {len(value)} fields"
    text = json.dumps(value[:80] if isinstance(value, str) else value, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:57]}…"
