"""The rows of batches: windows of text, packed documents or padded documents; each row is read by its number."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np

from meshwright.execution.data.document import Dataset
from meshwright.execution.training.data.row_index import RowIndex

Arrays = dict[str, np.ndarray]


class Rows(Protocol):
    """Rows by number.

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
        """Return the arrays of a row, each [seq_len]."""
        ...

    def sizes(self, rows: np.ndarray) -> Sizes:
        """Return the totals of some rows."""
        ...


class Sizes(NamedTuple):
    """Totals of some rows.

    Args:
        documents: number of documents or pieces of them; None for windows.
        tokens: number of tokens without padding.
        loss_tokens: number of tokens with loss.
    """

    documents: int | None
    tokens: int
    loss_tokens: int


class WindowRows:
    """Windows of a text that overlap by one token: the last target of a window is the first input of the next."""

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
        """Return the totals of some windows."""
        tokens = len(rows) * self._seq_len
        return Sizes(None, tokens, tokens)


class DocumentRows:
    """Documents in rows, each document a segment: several in a row if packed, else one with padding."""

    names: tuple[str, ...] = ("tokens", "targets", "positions", "segments", "weights")

    def __init__(self, name: str, dataset: Dataset, seq_len: int, index: RowIndex, *, is_packed: bool) -> None:
        long = "documents_split" if dataset.loss_counts is None else "documents_cut"
        self.name, self.count, self.is_packed = name, len(index.row_starts) - 1, is_packed
        self.notes = {what: count for what, count in ((long, index.long), ("no_loss", index.lost)) if count}
        self._dataset, self._seq_len, self._index = dataset, seq_len, index

    @property
    def fill(self) -> float:
        """The fraction of tokens in the rows that are not padding."""
        return float(self._index.tokens[-1]) / (self.count * self._seq_len)

    def read(self, row: int) -> Arrays:
        """Return `tokens`, `targets`, `positions`, `segments` (0 for padding, else from 1) and `weights` (0 or 1).

        Each array is [seq_len].
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
        """Return the totals of some rows."""
        documents, tokens, losses = (
            int((array[rows + 1] - array[rows]).sum())
            for array in (self._index.row_starts, self._index.tokens, self._index.losses)
        )
        return Sizes(documents, tokens, losses)


def empty_row(seq_len: int) -> Arrays:
    """Return a row of padding [seq_len]."""
    row = {name: np.zeros(seq_len, np.int32) for name in ("tokens", "targets", "positions", "segments")}
    return row | {"weights": np.zeros(seq_len, np.float32)}


def text_windows(dataset: Dataset, seq_len: int) -> int:
    """Return the number of windows in a text."""
    return max(int(dataset.offsets[-1]) - 1, 0) // seq_len
