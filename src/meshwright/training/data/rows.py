"""The rows of batches: windows of text, packed or padded documents; each read by its number."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np

from meshwright.data import Dataset
from meshwright.errors import MeshwrightError
from meshwright.training.data.packing import Pieces, pack, pieces

Arrays = dict[str, np.ndarray]


class Rows(Protocol):
    """Rows by number.

    name: of the source. count: how many there are. notes: documents by what was done with them. names: of the arrays of
    a row.
    """

    name: str
    count: int
    notes: dict[str, int]
    names: tuple[str, ...]

    def read(self, row: int) -> Arrays:
        """The arrays of a row [seq_len]."""
        ...

    def sizes(self, rows: np.ndarray) -> Sizes:
        """What some rows have together."""
        ...


class Sizes(NamedTuple):
    """documents: whole ones or pieces; None of windows. tokens: without padding. loss_tokens: those with loss."""

    documents: int | None
    tokens: int
    loss_tokens: int


class WindowRows:
    """Windows of a text, of which each overlaps the next by one token: its last target is the next one's first token.

    windows: the numbers of those that these rows are.
    """

    names: tuple[str, ...] = ("tokens", "targets")

    def __init__(self, name: str, dataset: Dataset, seq_len: int, windows: np.ndarray) -> None:
        self.name, self.count, self.notes = name, len(windows), {}
        self._dataset, self._seq_len, self._windows = dataset, seq_len, windows
        self._ends = np.cumsum(dataset.lengths)

    def read(self, row: int) -> Arrays:
        """`tokens` and `targets` [seq_len]."""
        start = int(self._windows[row]) * self._seq_len
        stop, found = start + self._seq_len + 1, []
        document = int(np.searchsorted(self._ends, start, side="right"))
        while start < stop:
            begin = int(self._ends[document - 1]) if document else 0
            last = min(stop, int(self._ends[document]))
            found.append(self._dataset.read(document, start - begin, last - begin).tokens)
            start, document = last, document + 1
        window = np.concatenate(found)
        return {"tokens": window[:-1], "targets": window[1:]}

    def sizes(self, rows: np.ndarray) -> Sizes:
        """What some windows have together."""
        tokens = len(rows) * self._seq_len
        return Sizes(None, tokens, tokens)


class DocumentRows:
    """Documents in rows, each a segment of its own: several where they are packed, else one and padding."""

    names: tuple[str, ...] = ("tokens", "targets", "positions", "segments", "weights")

    def __init__(self, name: str, dataset: Dataset, seq_len: int, found: Pieces, *, is_packed: bool) -> None:
        self.name = name
        self.notes = {
            name: count
            for name, count in (
                ("documents_split" if dataset.loss_counts is None else "documents_cut", found.long),
                ("no_loss", found.lost),
            )
            if count
        }
        self._dataset, self._seq_len = dataset, seq_len
        self._documents, self._starts, self._slots = found.documents, found.starts, found.slots
        self.is_packed = is_packed
        starts = pack(found.slots, seq_len) if is_packed else np.arange(len(found.slots) + 1)
        self._row_starts, self.count = starts, len(starts) - 1
        self._tokens = np.concatenate([[0], np.cumsum(found.slots, dtype=np.int64)])[starts]
        has_all = found.loss_counts is found.slots
        losses = (
            self._tokens if has_all else np.concatenate([[0], np.cumsum(found.loss_counts, dtype=np.int64)])[starts]
        )
        self._losses = losses

    @property
    def fill(self) -> float:
        """The share of the rows that is no padding."""
        return float(self._tokens[-1]) / (self.count * self._seq_len)

    def read(self, row: int) -> Arrays:
        """`tokens`, `targets`, `positions`, `segments` (from 1; 0 is padding) and `weights` (0 or 1) [seq_len]."""
        found = empty_row(self._seq_len)
        at = 0
        for segment, piece in enumerate(range(self._row_starts[row], self._row_starts[row + 1]), start=1):
            start, slots = int(self._starts[piece]), int(self._slots[piece])
            document = self._dataset.read(int(self._documents[piece]), start, start + slots + 1)
            here = slice(at, at + slots)
            found["tokens"][here] = document.tokens[:-1]
            found["targets"][here] = document.tokens[1:]
            found["positions"][here] = np.arange(slots)
            found["segments"][here] = segment
            found["weights"][here] = 1 if document.loss is None else document.loss[1:]
            at += slots
        return found

    def sizes(self, rows: np.ndarray) -> Sizes:
        """What some rows have together."""
        documents, tokens, losses = (
            int((array[rows + 1] - array[rows]).sum()) for array in (self._row_starts, self._tokens, self._losses)
        )
        return Sizes(documents, tokens, losses)


def empty_row(seq_len: int) -> Arrays:
    """A row of padding [seq_len]."""
    row = {name: np.zeros(seq_len, np.int32) for name in ("tokens", "targets", "positions", "segments")}
    return row | {"weights": np.zeros(seq_len, np.float32)}


def text_windows(dataset: Dataset, seq_len: int) -> int:
    """How many windows a text has."""
    return max(int(dataset.lengths.sum()) - 1, 0) // seq_len


def document_rows(
    name: str, dataset: Dataset, seq_len: int, documents: np.ndarray, *, is_packed: bool, seed: int | None
) -> DocumentRows:
    """Rows of documents in an order that only the seed decides, or in theirs where it is None."""
    found = pieces(dataset, documents, seq_len)
    if not len(found.slots):
        raise MeshwrightError(f"{name} has no document with loss in its first {seq_len:,} tokens")
    if seed is not None:
        found = found.take(np.random.default_rng(seed).permutation(len(found.slots)))
    return DocumentRows(name, dataset, seq_len, found, is_packed=is_packed)
