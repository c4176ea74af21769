"""Errors as OpenAI's clients read them: what is wrong, the value, and what would be right."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel, ValidationError
from starlette.requests import Request
from starlette.responses import Response

from meshwright.errors import MeshwrightError
from meshwright.serving.request import ClosedError, OverloadedError

TYPES = {401: "authentication_error", 429: "rate_limit_error"}
"""The `type` of an error by its status; others are `server_error` from 500, and `invalid_request_error` below."""

UNKNOWN_FIELD = "unknown_field"
"""The code of an error about a field that this server does not know."""

CLOSE = {"connection": "close"}
"""Headers of an answer after which the connection is of no more use."""


class ErrorFields(BaseModel):
    """What is wrong with a request.

    Args:
        message: what is wrong, the value, and what would be right. type: the kind of error. param: the field, if one
            is at fault. code: a word for programs, if there is one.
    """

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorReply(BaseModel):
    """The body of every answer that is an error."""

    error: ErrorFields


class ApiError(Exception):
    """A request that is not answered, and why.

    Args:
        message: what is wrong, the value, and what would be right.
        status: of HTTP. param: the field that is at fault. code: a word for programs. headers: of the answer.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        kind = TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
        self.status = status
        self.headers = headers or {}
        self.reply = ErrorReply(error=ErrorFields(message=message, type=kind, param=param, code=code))

    def json(self) -> bytes:
        """The error as an answer's body."""
        return self.reply.model_dump_json().encode()

    def response(self) -> Response:
        """The error as an answer."""
        return Response(self.json(), self.status, self.headers, "application/json")


def respond_to_error(_: Request, error: Exception) -> Response:
    """The answer to an `ApiError`."""
    assert isinstance(error, ApiError)
    return error.response()


def from_engine(error: MeshwrightError) -> ApiError:
    """What an engine says to a request that it does not take."""
    if isinstance(error, OverloadedError):
        retry = {"retry-after": str(max(1, math.ceil(error.retry_seconds)))}
        return ApiError(str(error), status=429, code="overloaded", headers=retry)
    if isinstance(error, ClosedError):
        return ApiError(str(error), status=503, code="closed")
    return ApiError(str(error))


def from_validation(error: ValidationError, model: type[BaseModel], data: dict[str, Any]) -> ApiError:
    """What is wrong with the fields of a request, `data`, which is no `model`."""
    found = error.errors(include_url=False, include_input=False)
    unknown = next((each for each in found if each["type"] == UNKNOWN_FIELD), None)
    if unknown is not None:
        context = unknown.get("ctx", {})
        path = _written((*_path(data, unknown["loc"]), context["name"][:100]))
        return ApiError(f"{path} is no field of this request; {context['hint']}", param=path, code=UNKNOWN_FIELD)
    first = found[0]["loc"][:1]
    deepest = max((each for each in found if each["loc"][:1] == first), key=lambda each: len(_path(data, each["loc"])))
    path, location = _path(data, deepest["loc"]), deepest["loc"]
    field = model.model_fields.get(str(location[0])) if location else None
    # Of a field that is one of several types, each error is about one of them.
    is_union = len(location) > 1 and location[:2] != path[:2]
    if field is not None and field.description and (len(path) == 1 or is_union):
        path, wanted = path[:1], f"it is {field.description}"
    else:
        wanted = deepest["msg"].replace("Input should", "it should").replace("Value error, ", "")
        wanted = wanted.replace("Field required", "it is required")
    if deepest["type"] == "missing" and not is_union:
        return ApiError(f"{_written(path)} is missing; {wanted}", param=_written(path))
    return ApiError(f"{_written(path)} is {short(_at(data, path))}; {wanted}", param=_written(path))


def _path(data: Any, location: Sequence[int | str]) -> tuple[int | str, ...]:
    """Where in the data an error is: pydantic's location without the names of a union's members."""
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


def _at(data: Any, path: Sequence[int | str]) -> Any:
    """The value at a path; None where there is none."""
    for key in path:
        data = data.get(key) if isinstance(data, dict) else data[key] if isinstance(key, int) else None
    return data


def _written(path: Sequence[int | str]) -> str:
    """A path as people write it: messages[0].role."""
    text = "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in path)
    return text.removeprefix(".") or "the body"


def short(value: Any) -> str:
    """A value of a request as an error says it: at most some 60 characters."""
    if isinstance(value, list):
        return f"a list of {len(value)}" if value else "an empty list"
    if isinstance(value, dict):
        return f"an object of {len(value)} fields"
    text = json.dumps(value[:80] if isinstance(value, str) else value, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:57]}…"
