"""Tokenise one unit of work: convert ranges of files to the arrays of one shard of a token store."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
from array import array
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from meshwright.execution.data.bad_data import BadData, BadRecordError, Rule
from meshwright.execution.data.document import Document
from meshwright.execution.data.encoding import Encoder
from meshwright.execution.data.records import Range, read_records
from meshwright.execution.data.store import BLOCK, Shard, loss_file, tokens_file
from meshwright.support.files import write_error, write_file


@dataclass(frozen=True)
class Unit:
    """A unit of work: the ranges of files that become shard `number`."""

    number: int
    ranges: tuple[Range, ...]

    @property
    def num_bytes(self) -> int:
        """Approximate size of the unit in its files."""
        return sum(part.num_bytes for part in self.ranges)


def shard_info_file(number: int) -> str:
    """Return the name of the file that marks shard `number` as complete; it is deleted once the store is complete."""
    return f"{number:06d}.json"


def shard_lengths_file(number: int) -> str:
    """Return the name of the file with each document's numbers of tokens and of tokens with loss, [documents, 2].

    number: the shard's. The file is deleted once the store is complete.
    """
    return f"{number:06d}.lengths.npy"


def make_shard(unit: Unit, encoder: Encoder, rule: Rule, directory: Path) -> Shard:
    """Tokenise a unit, write the arrays of its shard to `directory`, and return the shard's description.

    The file `NUMBER.json` is written last and marks the shard as complete. Each document is written once it is
    tokenised, so that a compressed file or a row group of any size needs little memory.

    Raises:
        MeshwrightError: a record is bad and the rule does not skip it, or the disk is full.
    """
    bad = BadData(rule)
    sizes = array("q")
    has_loss, largest, checksum = False, -1, hashlib.sha256()
    dtype = np.uint8 if encoder.vocab <= 1 << 8 else np.uint16 if encoder.vocab <= 1 << 16 else np.uint32
    tokens_path, loss_path = directory / tokens_file(unit.number), directory / loss_file(unit.number)
    with _ArrayFile(tokens_path, dtype) as tokens, _ArrayFile(loss_path, np.bool_) as loss:
        for document in (document for part in unit.ranges for document in _documents(part, encoder, bad)):
            if document.loss is not None and not has_loss:
                has_loss = True
                # All tokens of earlier documents have loss.
                for start in range(0, tokens.count, BLOCK):
                    loss.append(np.ones(min(BLOCK, tokens.count - start), bool))
            tokens.append(document.tokens)
            if has_loss:
                loss.append(np.ones(len(document.tokens), bool) if document.loss is None else document.loss)
            checksum.update(document.tokens.astype(np.uint32).data)
            sizes.extend((len(document.tokens), document.loss_tokens))
            largest = max(largest, int(document.tokens.max()))
    if has_loss:
        masks = np.load(loss_path, mmap_mode="r")
        for start in range(0, len(masks), BLOCK):
            checksum.update(np.ascontiguousarray(masks[start : start + BLOCK]).data)
    else:
        loss_path.unlink()
    checksum.update(sizes)
    lengths = np.frombuffer(sizes, np.int64).reshape(-1, 2)
    write_file(directory / shard_lengths_file(unit.number), npy(lengths))
    shard = Shard(
        documents=len(lengths),
        tokens=tokens.count,
        has_loss=has_loss,
        largest=largest,
        checksum=checksum.hexdigest(),
        bad=dict(bad.counts),
    )
    write_file(directory / shard_info_file(unit.number), json.dumps(asdict(shard)))
    return shard


class _ArrayFile:
    """A one-dimensional `.npy` file that is written piece by piece inside a `with` block.

    It has a temporary name until the block ends without an error. count: number of values written so far.
    """

    def __init__(self, path: Path, dtype: type) -> None:
        self._path, self._partial = path, path.with_suffix(".partial")
        self._dtype, self.count = np.dtype(dtype), 0

    def __enter__(self) -> _ArrayFile:
        try:
            self._file = self._partial.open("wb")
        except OSError as error:
            raise write_error(self._path, error) from None
        self._write_header()
        return self

    def append(self, values: np.ndarray) -> None:
        """Append values [n], converted to the file's dtype."""
        self.count += len(values)
        try:
            self._file.write(values.astype(self._dtype).data)
        except OSError as error:
            raise write_error(self._path, error) from None

    def __exit__(self, kind: object, *_: object) -> None:
        try:
            if kind is None:
                self._file.seek(0)
                self._write_header()
                self._file.flush()
                os.fsync(self._file.fileno())
                self._partial.replace(self._path)
        except OSError as error:
            raise write_error(self._path, error) from None
        finally:
            with contextlib.suppress(OSError):  # The disk is full, which was reported already.
                self._file.close()
            self._partial.unlink(missing_ok=True)

    def _write_header(self) -> None:
        # NumPy pads the header, so that one with a larger count takes the same space.
        header = {"descr": self._dtype.str, "fortran_order": False, "shape": (self.count,)}
        np.lib.format.write_array_header_1_0(self._file, header)


def npy(array: np.ndarray) -> bytes:
    """Return an array as the bytes of a `.npy` file."""
    out = io.BytesIO()
    np.save(out, array)
    return out.getvalue()


def _documents(part: Range, encoder: Encoder, bad: BadData) -> Iterator[Document]:
    """Yield the documents of a range; `bad` counts bad records, or raises."""
    for number, record in enumerate(read_records(part)):
        try:
            if isinstance(record, BadRecordError):
                raise record
            yield from encoder(record)
        except BadRecordError as error:
            bad.add(error, part.place(number))
