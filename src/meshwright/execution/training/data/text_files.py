"""Text files read as bytes: each byte is a token."""

from __future__ import annotations

import codecs
import hashlib
import os
import sysconfig
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from meshwright.errors import MeshwrightError
from meshwright.execution.data.document import Document


class TextBytes:
    """Text files as a `Dataset`: each file is a document whose tokens are its bytes, with a newline between files.

    Files are not memory-mapped: reading a mapped file that was truncated meanwhile ends the process (SIGBUS).
    """

    loss_counts = None

    def __init__(self, files: Sequence[Path]) -> None:
        self._files = files
        self._stats = [_stat(file) for file in files]
        sizes = np.array([size for size, _ in self._stats], np.int64)
        self.offsets = np.concatenate([[0], np.cumsum(sizes + (np.arange(len(files)) < len(files) - 1))])

    def read(self, document: int, start: int = 0, stop: int | None = None) -> Document:
        """Return bytes `start` to `stop` of file number `document`; the newline after the file counts as its last byte.

        Raises:
            MeshwrightError: the file cannot be read, or has changed since this object was created.
        """
        length = int(self.offsets[document + 1] - self.offsets[document])
        stop = length if stop is None else min(stop, length)
        path, (size, _) = self._files[document], self._stats[document]
        tokens = np.full(stop - start, ord("\n"), np.int32)
        if _stat(path) != self._stats[document]:
            raise MeshwrightError(f"{path} was changed while the run reads it")
        if start < size:
            try:
                with path.open("rb", buffering=0) as file:
                    tokens[: size - start] = np.frombuffer(
                        os.pread(file.fileno(), min(stop, size) - start, start), np.uint8
                    )
            except (OSError, ValueError) as error:  # ValueError: fewer bytes than there were a moment ago.
                raise MeshwrightError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from None
        return Document(tokens)


def _stat(path: Path) -> tuple[int, int]:
    """Return the size of a file in bytes, and its modification time in nanoseconds."""
    try:
        stat = path.stat()
    except OSError as error:
        raise MeshwrightError(f"cannot read {path}: {error.strerror}") from None
    return stat.st_size, stat.st_mtime_ns


def standard_library() -> list[Path]:
    """Return the files of the top-level modules of Python's standard library, about 10 MB."""
    return sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))


def check_text(files: Sequence[Path]) -> str:
    """Return a checksum of text files.

    Raises:
        MeshwrightError: a file cannot be read, is not UTF-8 or is binary.
    """
    checksum = hashlib.sha256()
    for path in files:
        decoder, before = codecs.getincrementaldecoder("utf-8")(), 0
        try:
            with path.open("rb") as file:
                while piece := file.read(1 << 20):
                    decoder.decode(piece)
                    checksum.update(piece)
                    if (zero := piece.find(b"\0")) >= 0:
                        raise MeshwrightError(
                            f"{path} is binary (a zero byte at {before + zero:,}); --data takes text files"
                        )
                    before += len(piece)
            decoder.decode(b"", final=True)
        except OSError as error:
            raise MeshwrightError(f"cannot read {path}: {error.strerror}") from None
        except UnicodeDecodeError:
            raise MeshwrightError(f"{path} is not UTF-8 text; --data takes UTF-8") from None
        checksum.update(b"\n")
    return checksum.hexdigest()
