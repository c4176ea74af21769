"""A text in the notation as words and signs, and a reader that goes through them."""

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
    """The tokens of a text, closed by one of kind `end`. White space only separates."""
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
    """A place in the tokens of one text; every mistake it reports carries the text and a position.

    axes: those of the mesh, None where there is no mesh yet.
    """

    def __init__(self, text: str, axes: Collection[str] | None) -> None:
        # One character for one, so that positions stay: a message shows the text on one line.
        self.text = "".join(" " if character.isspace() else character for character in text)
        self.axes = axes
        self._tokens = tokenize(self.text)
        self._index = 0

    @property
    def token(self) -> Token:
        """The token that comes next."""
        return self._tokens[self._index]

    @property
    def following(self) -> Token:
        """The token after the next."""
        return self._tokens[min(self._index + 1, len(self._tokens) - 1)]

    def take(self) -> Token:
        """The next token, passed."""
        token = self.token
        self._index = min(self._index + 1, len(self._tokens) - 1)
        return token

    def accept(self, *kinds: str) -> Token | None:
        """The next token, passed, if it is of one of these kinds or is one of these words."""
        return self.take() if self.token.kind in kinds or self.token.text in kinds else None

    def expect(self, kind: str, what: str) -> Token:
        """The next token, passed; a mistake where it is of another kind."""
        token = self.accept(kind)
        if token is None:
            raise self.mistake(f"{what} expected, not {self.token.text or 'the end'}", self.token.position)
        return token

    def mistake(self, reason: str, position: int) -> NotationError:
        """The error to raise for a mistake at a position."""
        return NotationError(reason, text=self.text, position=position)

    def build(self, position: int, make: Callable[..., Built], *arguments: object) -> Built:
        """What `make` makes of the arguments; where it complains, its complaint with the position."""
        try:
            return make(*arguments)
        except MeshwrightError as complaint:
            raise self.mistake(str(complaint), position) from None
