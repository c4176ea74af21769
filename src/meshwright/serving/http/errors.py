"""Error responses in OpenAI's format. A message says what is wrong, the value, and what would be right."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from meshwright.errors import MeshwrightError
from meshwright.serving.engine.request import ClosedError, OverloadedError, UnknownAdapterError

_LOG = logging.getLogger("meshwright.serving")

TYPES = {401: "authentication_error", 429: "rate_limit_error"}
"""The `type` of an error by HTTP status; other statuses are `server_error` from 500, else `invalid_request_error`."""

CLOSE = {"connection": "close"}
"""Response header that makes the server close the connection after the response."""


class ErrorFields(BaseModel):
    """The error of a request.

    Args:
        message: what is wrong, the value, and what would be right.
        type: the class of error, see `TYPES`.
        param: name of the request's invalid field; None if the error is of no single field.
        code: a stable identifier of the error for programs, if there is one.
    """

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorResponse(BaseModel):
    """The body of every error response."""

    error: ErrorFields


class ApiError(Exception):
    """An error that becomes the response to a request.

    Args:
        message: what is wrong, the value, and what would be right.
        status: the HTTP status.
        param: name of the request's invalid field.
        code: a stable identifier of the error for programs.
        headers: additional headers of the response.
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
        # Escape unprintable characters from the request, so that the message is one line.
        message = "".join(char if char.isprintable() else repr(char)[1:-1] for char in message)
        super().__init__(message)
        kind = TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
        self.status = status
        self.headers = headers or {}
        self.body = ErrorResponse(error=ErrorFields(message=message, type=kind, param=param, code=code))

    def renamed(self, fields: Mapping[str, str]) -> ApiError:
        """Return the error with request fields renamed, in `param` and as the first word of the message.

        fields: new names by old name.
        """
        was = self.body.error
        param, first = fields.get(was.param or "", was.param), was.message.partition(" ")[0]
        message = fields.get(first, first) + was.message[len(first) :]
        return ApiError(message, status=self.status, param=param, code=was.code, headers=self.headers)

    def json(self) -> bytes:
        """Return the response body."""
        return self.body.model_dump_json().encode()

    def response(self) -> Response:
        """Return the error as a Starlette response."""
        return Response(self.json(), self.status, self.headers, "application/json")


def respond_to_error(_: Request, error: Exception) -> Response:
    """Return the response for an `ApiError`; Starlette's exception handler."""
    assert isinstance(error, ApiError)
    return error.response()


def internal_error(error: Exception, request_id: str) -> ApiError:
    """Log an unexpected exception that ended a request, under the request's id, and return the error for the client."""
    _LOG.error("error %s ended a request", request_id, exc_info=error)
    message = f"internal server error {request_id}: {type(error).__name__}; the server's log has it under this id"
    return ApiError(message, status=500, code="fault", headers=CLOSE)


def from_engine_error(error: MeshwrightError) -> ApiError:
    """Convert an error of `EngineClient.submit` to an error response.

    Status 404 for an adapter that is not loaded, 429 for a full queue, 503 for a closed engine, else 400.
    """
    if isinstance(error, OverloadedError):
        retry = {"retry-after": str(max(1, math.ceil(error.retry_seconds)))}
        return ApiError(str(error), status=429, code="overloaded", headers=retry)
    if isinstance(error, UnknownAdapterError):
        return ApiError(str(error), status=404, param="model", code="model_not_found")
    if isinstance(error, ClosedError):
        return ApiError(str(error), status=503, code="closed")
    # An error of the engine begins with the engine's name of the invalid field; of a prompt, with "token".
    first = str(error).partition(" ")[0]
    param = "prompt" if first == "token" else first if first in ("stop_tokens", "logit_bias") else None
    return ApiError(str(error), param=param).renamed({"stop_tokens": "stop_token_ids"})
