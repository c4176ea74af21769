"""Text files read as bytes: tokens as they lie on the disk, mapped into memory."""

from __future__ import annotations

import codecs
import hashlib
import sysconfig
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np

from meshwright.data import Document
from meshwright.errors import MeshwrightError


class TextBytes:
    """Files as a `Dataset`: each is a document, and a newline stands between one and the next."""

    loss_counts = None

    def __init__(self, files: Sequence[Path]) -> None:
        self._files = files
        sizes = np.array([file.stat().st_size for file in files], np.int64)
        self.offsets = np.concatenate([[0], np.cumsum(sizes + (np.arange(len(files)) < len(files) - 1))])
        self._mapped = lru_cache(maxsize=4096)(lambda file: np.memmap(file, np.uint8, "r"))

    def read(self, document: int, start: int = 0, stop: int | None = None) -> Document:
        """Bytes `start` to `stop` of a file with the newline after it."""
        length = int(self.offsets[document + 1] - self.offsets[document])
        stop = length if stop is None else min(stop, length)
        size = length - (document < len(self._files) - 1)
        found = np.full(stop - start, ord("\n"), np.int32)
        if start < size:
            found[: size - start] = self._mapped(self._files[document])[start : min(stop, size)]
        return Document(found)


def standard_library() -> list[Path]:
    """The modules of the standard library that lie at its top: about 10 MB of Python on every machine."""
    return sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))


def check_text(files: Sequence[Path]) -> str:
    """A checksum of files of text.

    Raises:
        MeshwrightError: one cannot be read, is not UTF-8 or is binary.
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
