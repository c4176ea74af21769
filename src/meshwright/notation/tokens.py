"""Tokens of a text in the notation, and a reader of them."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TypeVar

from meshwright.errors import MeshwrightError, NotationError

Built = TypeVar("Built")

_PATTERN = re.compile(
    r"(?P<arrow>->|→)|(?P<times>[@·×.])|(?P<word>[A-Za-z][A-Za-z0-9_]*)|(?P<number>-?[0-9]{1,18})|(?P<sign>[][{}(),=])"
)


@dataclass(frozen=True)
class Token:
    """A piece of the text: kind `word`, `number`, `arrow`, `times`, `end`, or the sign itself."""

    kind: str
    text: str
    position: int


def tokenize(text: str) -> list[Token]:
    """The tokens of a text, followed by one of kind `end`. White space separates."""
    tokens: list[Token] = []
    position = 0
    while position < len(text):
        if text[position].isspace():
            position += 1
            continue
        match = _PATTERN.match(text, position)
        if match is None:
            raise NotationError(f"{text[position]!r} is no sign of the notation", text=text, position=position)
        kind = match.group() if match.lastgroup == "sign" else str(match.lastgroup)
        tokens.append(Token(kind, match.group(), position))
        position = match.end()
    return [*tokens, Token("end", "", len(text))]


class Reader:
    """A position in the tokens of a text; its errors show the text and a position.

    axes: those of the mesh; None without a mesh.
    """

    def __init__(self, text: str, axes: Collection[str] | None) -> None:
        # Errors show the text on one line; positions stay the same.
        self.text = "".join(" " if character.isspace() else character for character in text)
        self.axes = axes
        self._tokens = tokenize(self.text)
        self._index = 0

    @property
    def token(self) -> Token:
        """The next token."""
        return self._tokens[self._index]

    @property
    def following(self) -> Token:
        """The token after the next."""
        return self._tokens[min(self._index + 1, len(self._tokens) - 1)]

    def take(self) -> Token:
        """Return the next token and move past it."""
        token = self.token
        self._index = min(self._index + 1, len(self._tokens) - 1)
        return token

    def accept(self, *kinds: str) -> Token | None:
        """Take the next token if it is of one of these kinds, or one of these words; else None."""
        return self.take() if self.token.kind in kinds or self.token.text in kinds else None

    def expect(self, kind: str, what: str) -> Token:
        """Take the next token; raises if it is of another kind. what: for the error."""
        token = self.accept(kind)
        if token is None:
            raise self.mistake(f"{what} expected, not {self.token.text or 'the end'}", self.token.position)
        return token

    def mistake(self, reason: str, position: int) -> NotationError:
        """An error at a position."""
        return NotationError(reason, text=self.text, position=position)

    def build(self, position: int, make: Callable[..., Built], *arguments: object) -> Built:
        """Call `make`; its errors get the position."""
        try:
            return make(*arguments)
        except MeshwrightError as error:
            raise self.mistake(str(error), position) from None
