"""Unexpected exceptions: an exception in a request ends that request, one in a device program ends the engine."""

from __future__ import annotations

import logging
import secrets
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_LOG = logging.getLogger("meshwright.serving")


class DeviceError(Exception):
    """A device program failed; the pages and row states on the devices are lost."""


@contextmanager
def device_errors() -> Iterator[None]:
    """Inside the context, every exception becomes a `DeviceError`."""
    try:
        yield
    except Exception as error:
        raise DeviceError(f"a program on the devices failed: {first_line(error)}") from error


def log_fault(what: str) -> str:
    """Log the exception being handled under a new id. Return the message for the client, which has the id.

    what: what the exception ended, for the log.
    """
    fault = secrets.token_hex(4)
    _LOG.error("error %s ended %s", fault, what, exc_info=True)
    return f"internal error {fault} ({type(sys.exception()).__name__}); the server's log has it under this id"


def first_line(error: BaseException) -> str:
    """Return the type of an exception and the first line of its message."""
    lines = f"{type(error).__name__}: {error}".splitlines()
    return lines[0]
