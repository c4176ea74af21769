"""Documents (token ids with loss masks), preference pairs of documents, and the interface of data sets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import numpy as np

Form = Literal["file", "text", "tokens", "chat", "pairs"]
"""How records become documents.

`file`: the text of a file. `text`: text fields, by a template. `tokens`: a field of token ids. `chat`: a field of
messages. `pairs`: a prompt with a chosen and a rejected answer.
"""


@dataclass(frozen=True)
class Document:
    """A text as tokens.

    tokens: int32 [n]. loss: bool [n], whether the model is trained to predict each token; None if all tokens are.
    """

    tokens: np.ndarray
    loss: np.ndarray | None = None

    @property
    def loss_tokens(self) -> int:
        """The number of tokens with loss, without the first token, which is never predicted."""
        return max(len(self.tokens) - 1, 0) if self.loss is None else int(self.loss[1:].sum())


class Pair(NamedTuple):
    """A preference record: a prompt with the chosen answer, and the same prompt with the rejected answer.

    Both are whole documents that begin with the prompt; their `loss` marks the tokens of the answer.
    """

    chosen: Document
    rejected: Document


class Dataset(Protocol):
    """Documents, read by number."""

    @property
    def offsets(self) -> np.ndarray:
        """The index of each document's first token in all documents concatenated, and the total [documents + 1]."""
        ...

    @property
    def loss_counts(self) -> np.ndarray | None:
        """The `Document.loss_tokens` of each document [documents]; None if all tokens have loss."""
        ...

    def read(self, document: int, start: int = 0, stop: int | None = None) -> Document:
        """Return tokens `start` (included) to `stop` (excluded; default: the end) of document number `document`."""
        ...
