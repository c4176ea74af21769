"""Pack documents into rows of fixed length, from their lengths alone."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from meshwright.execution.data.document import Dataset

CHUNK = 4096
"""Number of pieces in a chunk. No row has pieces of two chunks, so all chunks are packed at once (vectorized)."""


class Pieces(NamedTuple):
    """Pieces to be packed into rows: whole documents, and parts of documents that are longer than a row.

    A piece of n slots has n consecutive tokens as inputs, and the tokens after each of them as targets.

    Args:
        documents: number of each piece's document, int64 [pieces].
        starts: index in its document of each piece's first token, int64 [pieces].
        slots: number of inputs of each piece, int32 [pieces].
        loss_counts: number of targets with a loss of each piece, int32 [pieces]; None if all targets have a loss.
        long: number of documents that were split or cut.
        lost: number of documents left out because no target has a loss after cutting.
    """

    documents: np.ndarray
    starts: np.ndarray
    slots: np.ndarray
    loss_counts: np.ndarray | None
    long: int
    lost: int


def pieces(dataset: Dataset, documents: np.ndarray, seq_len: int) -> Pieces:
    """Divide documents into pieces of at most `seq_len` slots.

    A longer document is split if all tokens of the dataset have a loss. If not, it is cut, because a later piece would
    lack its prompt.

    documents: numbers of the documents [n].
    """
    slots = np.asarray(dataset.offsets[documents + 1] - dataset.offsets[documents]) - 1
    is_long = slots > seq_len
    if dataset.loss_counts is None:
        counts = -(-slots // seq_len)
        first = np.cumsum(counts) - counts
        starts = (np.arange(counts.sum()) - np.repeat(first, counts)) * seq_len
        lengths = np.minimum(np.repeat(slots, counts) - starts, seq_len).astype(np.int32)
        return Pieces(np.repeat(documents, counts), starts, lengths, None, int(is_long.sum()), 0)
    loss_counts = dataset.loss_counts[documents].astype(np.int32)
    for number in np.flatnonzero(is_long):
        loss = dataset.read(int(documents[number]), 1, seq_len + 1).loss
        loss_counts[number] = seq_len if loss is None else loss.sum()
    kept = loss_counts > 0
    return Pieces(
        documents[kept],
        np.zeros(kept.sum(), np.int64),
        np.minimum(slots, seq_len).astype(np.int32)[kept],
        loss_counts[kept],
        int(is_long.sum()),
        int((~kept).sum()),
    )


def pack(slots: np.ndarray, seq_len: int) -> np.ndarray:
    """Pack pieces into rows greedily, in order; return which pieces each row has.

    The result is [rows + 1]: row i has the pieces from number result[i] up to, not including, result[i + 1].

    slots: number of slots of each piece, at most seq_len.
    """
    count = len(slots)
    ends = np.cumsum(slots, dtype=np.int64)
    # For each piece: if a row begins with it, the piece with which the next row begins.
    following = np.searchsorted(ends, ends - slots + seq_len, side="right")
    np.minimum(following, (np.arange(count) // CHUNK + 1) * CHUNK, out=following)
    begins = np.zeros(count + 1, bool)
    begins[count] = True
    at = np.arange(0, count, CHUNK)
    limits = np.minimum(at + CHUNK, count)
    while len(at):  # Each iteration finds one row in every chunk.
        begins[at] = True
        at = following[at]
        is_left = at < limits
        at, limits = at[is_left], limits[is_left]
    return np.flatnonzero(begins)
