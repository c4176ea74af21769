"""Index of the documents in each row, in a directory of files.

Arrays are written in blocks and memory-mapped, so that the memory needed does not grow with the data. A piece is a
document, or a part of a long one (`packing.Pieces`). The files:

documents, starts, slots      the fields of `packing.Pieces`, in the order in which pieces are packed
row_starts                    int64 [rows + 1]: number of the first piece of each row
tokens                        int64 [rows + 1]: number of inputs before each row
losses                        int64 [rows + 1]: number of targets with a loss before each row; only if some have none
index.json                    `pieces` and `rows`, their numbers; `long` and `lost`, as in `packing.Pieces`
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from meshwright.errors import MeshwrightError
from meshwright.execution.data.document import Dataset
from meshwright.execution.training.data.packing import CHUNK, pack, pieces

BLOCK = 8 * CHUNK
"""Number of documents or pieces in memory at a time."""

_DTYPES = {"slots": np.int32, "loss_counts": np.int32}
"""{file: its dtype}; all other arrays are int64."""


class RowIndex(NamedTuple):
    """The files of an index as memory-mapped arrays.

    documents, starts, slots: for each piece, the number of its document, the index in the document of its first token,
    and its number of inputs. row_starts: the number of each row's first piece [rows + 1]. tokens, losses: the numbers
    of inputs, and of targets with a loss, before each row [rows + 1]. long, lost: as in `packing.Pieces`.
    """

    documents: np.ndarray
    starts: np.ndarray
    slots: np.ndarray
    row_starts: np.ndarray
    tokens: np.ndarray
    losses: np.ndarray
    long: int
    lost: int


def write_row_index(
    directory: Path,
    dataset: Dataset,
    documents: Iterable[np.ndarray],
    seq_len: int,
    *,
    is_packed: bool,
    seed: int | None,
) -> None:
    """Write the index of documents into an empty directory.

    Args:
        directory: the directory.
        dataset: the dataset of the documents.
        documents: arrays of the numbers of the documents.
        is_packed: whether several documents may share a row.
        seed: determines the order of the pieces; None keeps the order of the documents.

    Raises:
        MeshwrightError: no document has a target with a loss.
    """
    count = long = lost = 0
    names = ["documents", "starts", "slots", *(["loss_counts"] if dataset.loss_counts is not None else [])]
    for block in documents:
        parts = pieces(dataset, block, seq_len)
        for name in names:
            _append(directory / name, getattr(parts, name))
        count, long, lost = count + len(parts.slots), long + parts.long, lost + parts.lost
    if not count:
        raise MeshwrightError(f"no document has loss in its first {seq_len:,} tokens")
    if seed is not None:
        _shuffle([directory / name for name in names], count, seed)
    num_rows = _write_rows(directory, count, seq_len, is_packed=is_packed)
    info = {"pieces": count, "rows": num_rows, "long": long, "lost": lost}
    (directory / "index.json").write_text(json.dumps(info))


def read_row_index(directory: Path) -> RowIndex:
    """Return the index written by `write_row_index`.

    Raises:
        MeshwrightError: a file is missing or truncated.
    """
    try:
        info = json.loads((directory / "index.json").read_text())
        documents, starts, slots = (
            _map_file(directory / name, info["pieces"]) for name in ("documents", "starts", "slots")
        )
        row_starts, tokens = (_map_file(directory / name, info["rows"] + 1) for name in ("row_starts", "tokens"))
        losses = _map_file(directory / "losses", info["rows"] + 1) if (directory / "losses").is_file() else tokens
    except (OSError, ValueError, KeyError) as error:
        raise MeshwrightError(f"{directory} is damaged ({error}); delete it, and the run makes it anew") from None
    return RowIndex(documents, starts, slots, row_starts, tokens, losses, info["long"], info["lost"])


def _shuffle(paths: Iterable[Path], count: int, seed: int) -> None:
    """Shuffle the `count` elements of each file, all files in the same order."""
    order_path = next(iter(paths)).with_name("order")
    order = np.asarray(np.memmap(order_path, np.int64, "w+", shape=(count,)))
    for start in range(0, count, BLOCK):
        order[start : start + BLOCK] = np.arange(start, min(start + BLOCK, count))
    np.random.default_rng(seed).shuffle(order)
    for path in paths:
        before, partial = _map_file(path, count), path.with_suffix(".partial")
        for start in range(0, count, BLOCK):
            _append(partial, before[order[start : start + BLOCK]])
        partial.replace(path)
    order_path.unlink()


def _write_rows(directory: Path, count: int, seq_len: int, *, is_packed: bool) -> int:
    """Pack pieces into rows; write the files `row_starts`, `tokens` and `losses`. Return the number of rows.

    count: number of pieces.
    """
    slots = _map_file(directory / "slots", count)
    sums = {"tokens": slots}
    if (directory / "loss_counts").is_file():
        sums["losses"] = _map_file(directory / "loss_counts", count)
    totals = dict.fromkeys(sums, 0)
    num_rows = 0
    for start in range(0, count, BLOCK):
        here = slice(start, start + BLOCK)
        firsts = pack(slots[here], seq_len)[:-1] if is_packed else np.arange(len(slots[here]))
        _append(directory / "row_starts", firsts + start)
        for name, of_pieces in sums.items():
            before = totals[name] + np.cumsum(of_pieces[here], dtype=np.int64)
            _append(directory / name, np.concatenate([[totals[name]], before])[firsts])
            totals[name] = int(before[-1])
        num_rows += len(firsts)
    for name, end in {"row_starts": count, **totals}.items():
        _append(directory / name, np.array([end]))
    (directory / "loss_counts").unlink(missing_ok=True)
    return num_rows


def _append(path: Path, array: np.ndarray) -> None:
    with path.open("ab") as file:
        file.write(array.astype(_DTYPES.get(path.stem, np.int64)).tobytes())


def _map_file(path: Path, count: int) -> np.ndarray:
    # A plain array over the same memory: indexing an np.memmap creates an object for every element.
    return np.asarray(np.memmap(path, _DTYPES.get(path.stem, np.int64), "r", shape=(count,)))
