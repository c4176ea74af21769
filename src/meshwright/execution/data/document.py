"""Documents: token ids with loss masks; and the two answers of a preference record."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import numpy as np

Form = Literal["file", "text", "tokens", "chat", "pairs"]
"""Form of a record: a text file, text fields of a template, token ids, chat messages, or a preference."""


@dataclass(frozen=True)
class Document:
    """A text as tokens.

    tokens: int32 [n]. loss: bool [n], whether the model is trained to predict each token; None if all tokens are.
    """

    tokens: np.ndarray
    loss: np.ndarray | None = None

    @property
    def loss_tokens(self) -> int:
        """The number of predicted tokens with loss; the first token is never predicted."""
        return max(len(self.tokens) - 1, 0) if self.loss is None else int(self.loss[1:].sum())


class Pair(NamedTuple):
    """A preference record: a prompt with the chosen answer, and the same prompt with the rejected answer.

    Each is a whole document, the prompt's tokens first; `loss` marks the tokens of the answer.
    """

    chosen: Document
    rejected: Document


class Dataset(Protocol):
    """Documents, read by number."""

    @property
    def offsets(self) -> np.ndarray:
        """Return the cumulative token counts [documents + 1]."""
        ...

    @property
    def loss_counts(self) -> np.ndarray | None:
        """Return the predicted tokens of each document that have loss [documents]; None if all but the first do."""
        ...

    def read(self, document: int, start: int = 0, stop: int | None = None) -> Document:
        """Read tokens `start` to `stop` of a document, or to its end."""
        ...
