"""The errors people see: what is wrong, the value, and what would be right."""

from __future__ import annotations


class MeshwrightError(ValueError):
    """A user's mistake, told in one line that names the values and what would be right."""


class DoesNotFitError(MeshwrightError):
    """A program that a device's memory does not hold. hlo: as far as the compiler came; '' where it made no buffers."""

    def __init__(self, message: str, hlo: str = "") -> None:
        super().__init__(message)
        self.hlo = hlo


class TemporaryError(MeshwrightError):
    """What may be otherwise later: the same command, started again, can succeed. Commands end with 1, not with 2."""


class NotationError(MeshwrightError):
    """A mistake in a text written in the notation; `position` is the character it stands at, from 0."""

    def __init__(self, reason: str, *, text: str, position: int) -> None:
        super().__init__(f"{reason}\n  {text}\n  {' ' * position}^")
        self.reason = reason
        self.text = text
        self.position = position
