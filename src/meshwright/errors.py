"""The errors people see: what is wrong, the value, and what would be right."""

from __future__ import annotations


class MeshwrightError(ValueError):
    """A user's mistake, told in one line that names the values and what would be right."""


class NotationError(MeshwrightError):
    """A mistake in a text written in the notation; `position` is the character it stands at, from 0."""

    def __init__(self, reason: str, *, text: str, position: int) -> None:
        super().__init__(f"{reason}\n  {text}\n  {' ' * position}^")
        self.reason = reason
        self.text = text
        self.position = position
