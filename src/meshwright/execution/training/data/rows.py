"""The rows of a source: windows of text, packed documents or padded documents; each row is read by its number."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np

from meshwright.execution.data.document import Dataset
from meshwright.execution.training.data.row_index import RowIndex

Arrays = dict[str, np.ndarray]


class Rows(Protocol):
    """The rows of a source, by number from 0.

    Args:
        name: name of the source.
        count: number of rows.
        notes: numbers of documents split, cut or left out, by kind.
        names: names of the arrays of a row.
    """

    name: str
    count: int
    notes: dict[str, int]
    names: tuple[str, ...]

    def read(self, row: int) -> Arrays:
        """Return the arrays of a row by name, each [seq_len]."""
        ...

    def sizes(self, rows: np.ndarray) -> Sizes:
        """Return the numbers of tokens, documents and losses that the rows with these numbers have together."""
        ...


class Sizes(NamedTuple):
    """Totals of some rows.

    Args:
        documents: number of documents or parts of documents; None for windows.
        tokens: number of inputs without padding.
        loss_tokens: number of targets with a loss.
    """

    documents: int | None
    tokens: int
    loss_tokens: int


class WindowRows:
    """Windows of a text that overlap by one token: the last target of a window is the first input of the next.

    Args:
        name: name of the source.
        dataset: the source, whose documents are read as one text.
        windows: for each row, the number of its window in the text.
    """

    names: tuple[str, ...] = ("tokens", "targets")

    def __init__(self, name: str, dataset: Dataset, seq_len: int, windows: Sequence[int] | np.ndarray) -> None:
        self.name, self.count, self.notes = name, len(windows), {}
        self._dataset, self._seq_len, self._windows = dataset, seq_len, windows

    def read(self, row: int) -> Arrays:
        """Return `tokens` and `targets` [seq_len]."""
        start = int(self._windows[row]) * self._seq_len
        stop, pieces = start + self._seq_len + 1, []
        offsets = self._dataset.offsets
        document = int(np.searchsorted(offsets[1:], start, side="right"))
        while start < stop:
            begin, last = int(offsets[document]), min(stop, int(offsets[document + 1]))
            pieces.append(self._dataset.read(document, start - begin, last - begin).tokens)
            start, document = last, document + 1
        window = np.concatenate(pieces)
        return {"tokens": window[:-1], "targets": window[1:]}

    def sizes(self, rows: np.ndarray) -> Sizes:
        """Return the totals of the rows with these numbers."""
        tokens = len(rows) * self._seq_len
        return Sizes(None, tokens, tokens)


class DocumentRows:
    """Rows of documents, each document a segment: several documents in a row if packed, else one with padding.

    Args:
        name: name of the source.
        index: the documents in each row.
        is_packed: whether several documents may share a row.
    """

    names: tuple[str, ...] = ("tokens", "targets", "positions", "segments", "weights")

    def __init__(self, name: str, dataset: Dataset, seq_len: int, index: RowIndex, *, is_packed: bool) -> None:
        long = "documents_split" if dataset.loss_counts is None else "documents_cut"
        self.name, self.count, self.is_packed = name, len(index.row_starts) - 1, is_packed
        self.notes = {what: count for what, count in ((long, index.long), ("no_loss", index.lost)) if count}
        self._dataset, self._seq_len, self._index = dataset, seq_len, index

    @property
    def fill(self) -> float:
        """The fraction of the rows' inputs that is not padding."""
        return float(self._index.tokens[-1]) / (self.count * self._seq_len)

    def read(self, row: int) -> Arrays:
        """Return the arrays [seq_len] `tokens`, `targets`, `positions`, `segments` and `weights`.

        `segments` is the number of an input's document in the row, from 1, or 0 for padding. `weights` is 1 for a
        target with a loss, else 0.
        """
        arrays, index = empty_row(self._seq_len), self._index
        at = 0
        for segment, piece in enumerate(range(index.row_starts[row], index.row_starts[row + 1]), start=1):
            start, slots = int(index.starts[piece]), int(index.slots[piece])
            document = self._dataset.read(int(index.documents[piece]), start, start + slots + 1)
            here = slice(at, at + slots)
            arrays["tokens"][here] = document.tokens[:-1]
            arrays["targets"][here] = document.tokens[1:]
            arrays["positions"][here] = np.arange(slots)
            arrays["segments"][here] = segment
            arrays["weights"][here] = 1 if document.loss is None else document.loss[1:]
            at += slots
        return arrays

    def sizes(self, rows: np.ndarray) -> Sizes:
        """Return the totals of the rows with these numbers."""
        documents, tokens, losses = (
            int((array[rows + 1] - array[rows]).sum())
            for array in (self._index.row_starts, self._index.tokens, self._index.losses)
        )
        return Sizes(documents, tokens, losses)


def empty_row(seq_len: int) -> Arrays:
    """Return the arrays [seq_len] of a row of padding, by name."""
    row = {name: np.zeros(seq_len, np.int32) for name in ("tokens", "targets", "positions", "segments")}
    return row | {"weights": np.zeros(seq_len, np.float32)}


def text_windows(dataset: Dataset, seq_len: int) -> int:
    """Return the number of windows of `seq_len` inputs in a dataset read as one text."""
    return max(int(dataset.offsets[-1]) - 1, 0) // seq_len
