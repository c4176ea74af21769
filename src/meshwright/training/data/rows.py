"""The rows of batches: windows of text, packed or padded documents, pairs of answers; each read by its number."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np

from meshwright.data import Dataset
from meshwright.errors import MeshwrightError
from meshwright.training.data.packing import Pieces, pack, pieces

Arrays = dict[str, np.ndarray]


class Rows(Protocol):
    """Rows by number. An item is one row, or of preferences the two rows of a pair.

    name: of the source. count: how many items there are. notes: documents by what was done with them. each: the rows of
    an item. names: of their arrays.
    """

    name: str
    count: int
    notes: dict[str, int]
    each: int
    names: tuple[str, ...]

    def read(self, item: int) -> Arrays:
        """The arrays of an item [rows of an item, seq_len]."""
        ...

    def sizes(self, items: np.ndarray) -> Sizes:
        """What some items have together."""
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

    each, names = 1, ("tokens", "targets")

    def __init__(self, name: str, dataset: Dataset, seq_len: int, windows: np.ndarray) -> None:
        self.name, self.count, self.notes = name, len(windows), {}
        self._dataset, self._seq_len, self._windows = dataset, seq_len, windows
        self._ends = np.cumsum(dataset.lengths)

    def read(self, item: int) -> Arrays:
        """`tokens` and `targets` [1, seq_len]."""
        start = int(self._windows[item]) * self._seq_len
        stop, found = start + self._seq_len + 1, []
        document = int(np.searchsorted(self._ends, start, side="right"))
        while start < stop:
            begin = int(self._ends[document - 1]) if document else 0
            last = min(stop, int(self._ends[document]))
            found.append(self._dataset.read(document, start - begin, last - begin).tokens)
            start, document = last, document + 1
        window = np.concatenate(found)[None]
        return {"tokens": window[:, :-1], "targets": window[:, 1:]}

    def sizes(self, items: np.ndarray) -> Sizes:
        """What some windows have together."""
        tokens = len(items) * self._seq_len
        return Sizes(None, tokens, tokens)


class DocumentRows:
    """Documents in rows, each a segment of its own: several where they are packed, else one and padding."""

    each, names = 1, ("tokens", "targets", "positions", "segments", "weights")

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
        self._pieces, self.is_packed = found, is_packed
        starts = pack(found.slots, seq_len) if is_packed else np.arange(len(found.slots) + 1)
        self._row_starts, self.count = starts, len(starts) - 1
        self._tokens = np.concatenate([[0], np.cumsum(found.slots, dtype=np.int64)])[starts]
        self._losses = np.concatenate([[0], np.cumsum(found.loss_counts, dtype=np.int64)])[starts]

    @property
    def fill(self) -> float:
        """The share of the rows that is no padding."""
        return float(self._tokens[-1]) / (self.count * self._seq_len)

    def read(self, item: int) -> Arrays:
        """`tokens`, `targets`, `positions`, `segments` (from 1; 0 is padding) and `weights` (0 or 1) [1, seq_len]."""
        row = empty_rows(1, self._seq_len)
        at = 0
        for segment, piece in enumerate(range(self._row_starts[item], self._row_starts[item + 1]), start=1):
            start, slots = int(self._pieces.starts[piece]), int(self._pieces.slots[piece])
            document = self._dataset.read(int(self._pieces.documents[piece]), start, start + slots + 1)
            here = slice(at, at + slots)
            row["tokens"][0, here] = document.tokens[:-1]
            row["targets"][0, here] = document.tokens[1:]
            row["positions"][0, here] = np.arange(slots)
            row["segments"][0, here] = segment
            row["weights"][0, here] = 1 if document.loss is None else document.loss[1:]
            at += slots
        return row

    def sizes(self, items: np.ndarray) -> Sizes:
        """What some rows have together."""
        documents, tokens, losses = (
            int((array[items + 1] - array[items]).sum()) for array in (self._row_starts, self._tokens, self._losses)
        )
        return Sizes(documents, tokens, losses)


class PairRows:
    """The two answers of preferences, each a padded row: first the chosen one, then the rejected one.

    A pair of which an answer has no token in its row is left out.
    """

    each, names = 2, ("tokens", "targets", "weights")

    def __init__(self, name: str, dataset: Dataset, seq_len: int, pairs: np.ndarray) -> None:
        both = np.stack([2 * pairs, 2 * pairs + 1], axis=1).ravel()
        found = pieces(dataset, both, seq_len)
        kept, times = np.unique(found.documents // 2, return_counts=True)
        is_whole = np.isin(found.documents // 2, kept[times == 2])
        self._rows = DocumentRows(name, dataset, seq_len, found.take(np.flatnonzero(is_whole)), is_packed=False)
        self.name, self.count, self.notes = name, self._rows.count // 2, self._rows.notes

    def read(self, item: int) -> Arrays:
        """`tokens`, `targets` and `weights` (0 or 1) [2, seq_len]; no token sees the padding, which is after it."""
        both = [self._rows.read(2 * item), self._rows.read(2 * item + 1)]
        return {name: np.concatenate([one[name] for one in both]) for name in self.names}

    def sizes(self, items: np.ndarray) -> Sizes:
        """What some pairs have together."""
        return self._rows.sizes(np.stack([2 * items, 2 * items + 1], axis=1).ravel())


def empty_rows(count: int, seq_len: int) -> Arrays:
    """Rows of padding [count, seq_len]."""
    rows = {name: np.zeros((count, seq_len), np.int32) for name in ("tokens", "targets", "positions", "segments")}
    return rows | {"weights": np.zeros((count, seq_len), np.float32)}


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
