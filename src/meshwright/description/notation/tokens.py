"""Tokens of a text in the notation, and a reader of them."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TypeVar

from meshwright.errors import MeshwrightError, NotationError

Built = TypeVar("Built")

_PATTERN = re.compile(
    r"(?P<arrow>->|→)|(?P<times>[@·×.])|(?P<collective>(?i:all-gather|reduce-scatter|all-reduce|all-to-all)"
    r"(?: *\((?:AG|RS|AR|A2A)\))?)|(?P<word>[A-Za-z](?:[A-Za-z0-9_]|<sub>[A-Za-z0-9]+</sub>)*)"
    r"|(?P<number>-?[0-9]{1,18})|(?P<sign>[][{}(),=])"
)

_COLLECTIVES = {"all-gather": "AG", "reduce-scatter": "RS", "all-reduce": "AR", "all-to-all": "A2A"}
"""Short names of the collectives that MaxText's sharding guide spells out, as in `Reduce-Scatter (RS) over x`."""

_DIM = re.compile(r"([A-Z])(?:_([a-z][a-z0-9]*)|<sub>([A-Za-z0-9]+)</sub>)?")
"""A dim of one capital letter with its subscript. The next dim may follow without a space."""

_DIMS_TOGETHER = re.compile(rf"(?:{_DIM.pattern})+")


@dataclass(frozen=True)
class Token:
    """A token of the text. kind: `word`, `number`, `arrow`, `times`, `end`, or the text of a sign."""

    kind: str
    text: str
    position: int


def tokenize(text: str, axes: Collection[str] | None = None) -> list[Token]:
    """Return the tokens of a text, followed by one of kind `end`. White space separates tokens.

    Single capital letters may be dims without spaces between them: `BM_x` is `B M_x`. Words are read this way if any
    subscript in the text has the form `<sub>x</sub>`, or is an axis of the mesh followed by further dims (`B_xE`).

    Raises:
        NotationError: a character is not in the notation.
    """
    tokens: list[Token] = []
    position = 0
    while position < len(text):
        if text[position].isspace():
            position += 1
            continue
        match = _PATTERN.match(text, position)
        if match is None:
            raise NotationError(f"{text[position]!r} is not a character of the notation", text=text, position=position)
        if match.lastgroup == "collective":
            tokens.append(Token("word", _COLLECTIVES[match.group().partition("(")[0].strip().lower()], position))
        else:
            kind = match.group() if match.lastgroup == "sign" else str(match.lastgroup)
            tokens.append(Token(kind, match.group(), position))
        position = match.end()
    if any(token.kind == "word" and _has_unspaced_dims(token.text, axes) for token in tokens):
        tokens = [part for token in tokens for part in _dims_of(token)]
    return [*tokens, Token("end", "", len(text))]


def _has_unspaced_dims(word: str, axes: Collection[str] | None) -> bool:
    """Whether a word can only be read as several dims of one letter each, as `B_xE`."""
    if "<sub>" in word:
        return True
    if axes is None or word.partition("_")[2] in axes or not _DIMS_TOGETHER.fullmatch(word):
        return False
    return any(match[2] in axes and match.end() < len(word) for match in _DIM.finditer(word))


def _dims_of(token: Token) -> list[Token]:
    """Return a token for each dim of a word of one-letter dims; any other token as it is."""
    is_short = token.text in _COLLECTIVES.values()
    if token.kind != "word" or is_short or not _DIMS_TOGETHER.fullmatch(token.text):
        return [token]
    found: list[Token] = []
    for match in _DIM.finditer(token.text):
        axis = match[2] or match[3]
        found.append(Token("word", f"{match[1]}_{axis}" if axis else match[1], token.position + match.start()))
    return found


class Reader:
    """A position in the tokens of a text, and methods that advance it. Errors point at the wrong character.

    axes: the axes of the mesh; None without a mesh.
    """

    def __init__(self, text: str, axes: Collection[str] | None) -> None:
        # Errors show the text on one line; positions stay the same.
        self.text = "".join(" " if character.isspace() else character for character in text)
        self.axes = axes
        self._tokens = tokenize(self.text, axes)
        self._index = 0

    @property
    def token(self) -> Token:
        """The next token."""
        return self._tokens[self._index]

    @property
    def following(self) -> Token:
        """The token after the next one."""
        return self._tokens[min(self._index + 1, len(self._tokens) - 1)]

    def take(self) -> Token:
        """Return the next token and move past it."""
        token = self.token
        self._index = min(self._index + 1, len(self._tokens) - 1)
        return token

    def accept(self, *kinds: str) -> Token | None:
        """Take the next token if it has one of these kinds or is one of these words; else return None."""
        return self.take() if self.token.kind in kinds or self.token.text in kinds else None

    def expect(self, kind: str, what: str) -> Token:
        """Take the next token. Raises if it is of another kind; `what` names the expected one in the error."""
        token = self.accept(kind)
        if token is None:
            raise self.mistake(f"{what} expected, not {self.token.text or 'the end'}", self.token.position)
        return token

    def mistake(self, reason: str, position: int) -> NotationError:
        """Return an error that points at a position in the text."""
        return NotationError(reason, text=self.text, position=position)

    def build(self, position: int, make: Callable[..., Built], *arguments: object) -> Built:
        """Return `make(*arguments)`; an error that it raises becomes one that points at the position."""
        try:
            return make(*arguments)
        except MeshwrightError as error:
            raise self.mistake(str(error), position) from None
