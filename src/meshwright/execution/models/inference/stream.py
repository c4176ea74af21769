"""Generated text as a stream: the text that each token adds, and the conditions that end a text."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypedDict

import numpy as np

from meshwright.description.step.strategy import SequenceMethod
from meshwright.errors import MeshwrightError
from meshwright.execution.models.generation.sampling import Sampling
from meshwright.execution.text.tokenizer import Tokenizer, TokenStream
from meshwright.support.field_types import check_fields

StoppedBy = Literal["length", "token", "text"]
"""Why a text ended: the maximum number of tokens, a stop token, or a stop string."""


class GenerateOptions(TypedDict, total=False):
    """Options of generation.

    Attributes:
        max_tokens: maximum number of new tokens per text (default 200).
        stop: strings that end a text.
        stop_tokens: tokens that end a text; default: those in the model's files.
        sampling: one `Sampling` for all prompts, or one for each; default: greedy.
        sp_method: how queries of a prompt reach keys split over sp: gather the keys, or send them round a ring, so that
            no device holds all keys of a long prompt; default: the method of training if sp > 1, else gather.
    """

    max_tokens: int
    stop: Sequence[str]
    stop_tokens: Sequence[int] | None
    sampling: Sampling | Sequence[Sampling]
    sp_method: SequenceMethod


@dataclass(frozen=True)
class ReadOptions:
    """`GenerateOptions` with defaults filled in and a `Sampling` for each prompt. Raises if a value is out of range."""

    max_tokens: int
    stop: tuple[str, ...]
    stop_tokens: tuple[int, ...]
    sampling: tuple[Sampling, ...]
    sp_method: SequenceMethod

    def __post_init__(self) -> None:
        check_fields(self)
        if self.max_tokens < 1:
            raise MeshwrightError(f"max_tokens is {self.max_tokens}; it is 1 or more")
        if "" in self.stop:
            raise MeshwrightError("a text of stop is empty, which every text begins with; leave it out")


@dataclass(frozen=True)
class Generated:
    """The text generated after one prompt: its tokens, their text (None without a tokenizer), and why it ended.

    Prompt, stop token and stop string are not included.
    """

    tokens: tuple[int, ...]
    text: str | None
    stopped_by: StoppedBy


class TokenText(NamedTuple):
    """The text that one token adds to the text of one prompt.

    Args:
        row: the prompt's index.
        text: whole characters that can be shown now. Incomplete characters, and text that may begin a stop string, are
          held back until a later token.
        token: the token; None for a stop token.
        done: why the text ends here; None if it continues.
    """

    row: int
    text: str
    token: int | None
    done: StoppedBy | None


def collect(pieces: Iterable[TokenText], *, has_text: bool) -> list[Generated]:
    """Return the whole text of each prompt, in order. has_text: whether there is a tokenizer, else texts are None."""
    rows: dict[int, list[TokenText]] = {}
    for piece in pieces:
        rows.setdefault(piece.row, []).append(piece)
    return [
        Generated(
            tuple(piece.token for piece in row if piece.token is not None),
            "".join(piece.text for piece in row) if has_text else None,
            row[-1].done or "length",
        )
        for _, row in sorted(rows.items())
    ]


def pieces_of(
    steps: Iterable[np.ndarray],
    num_rows: int,
    *,
    tokenizer: Tokenizer | None,
    max_tokens: int,
    stop: Sequence[str],
    stop_tokens: Sequence[int],
) -> Iterator[TokenText]:
    """Yield a `TokenText` for each token of each text, until all texts end.

    steps: arrays [rows], each with the next token of every row. Other arguments: see `GenerateOptions`.
    """
    rows = [GrowingText(tokenizer and TokenStream(tokenizer)) for _ in range(num_rows)]
    for number, tokens in enumerate(steps, start=1):
        for row, token in enumerate(tokens.tolist()):
            if rows[row].done is None:
                text = rows[row].add(token, stop_tokens, stop, is_last=number == max_tokens)
                yield TokenText(row, text, token if token not in stop_tokens else None, rows[row].done)
        if all(row.done for row in rows):
            return


@dataclass
class GrowingText:
    """A text that is being generated.

    stream: decodes tokens; None without a tokenizer. shown: number of characters of `text` that `add` has returned.
    done: why the text ended; None if it continues. stop: the stop string that ended it, if any.
    """

    stream: TokenStream | None
    text: str = ""
    shown: int = 0
    done: StoppedBy | None = None
    stop: str | None = None

    def add(self, token: int, ends: Container[int], stop: Sequence[str], *, is_last: bool) -> str:
        """Add a token; return the text that can be shown now, without a possible beginning of a stop string.

        ends: the stop tokens. is_last: whether the text reaches its maximum length with this token.
        """
        if token in ends:
            self.done = "token"
        else:
            self.text += self.stream.add(token) if self.stream else ""
            self.done = "length" if is_last else None
        if self.done and self.stream:
            self.text += self.stream.finish()
        found = [(at, text) for text in stop if (at := self.text.find(text, max(0, self.shown - len(text)))) >= 0]
        if found:
            at, self.stop = min(found)
            self.text, self.done = self.text[:at], "text"
        until = len(self.text) if self.done else len(self.text) - _held_back(self.text, stop)
        piece = self.text[self.shown : until]
        self.shown = max(self.shown, until)
        return piece


def _held_back(text: str, stop: Sequence[str]) -> int:
    """Return the number of characters at the end of a text that may begin a stop string."""
    return max((length for end in stop for length in range(1, len(end)) if text.endswith(end[:length])), default=0)
