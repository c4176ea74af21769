"""Text files as the tokens of one corpus."""

from __future__ import annotations

import codecs
import sysconfig
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from meshwright.errors import MeshwrightError
from meshwright.step import Workload
from meshwright.text import Tokenizer

BYTES = 256
"""The vocabulary of text read as bytes."""


def load_corpus(paths: tuple[str, ...], tokenizer: Tokenizer | None = None) -> np.ndarray:
    """The tokens of text files one after another; without any, the sources of Python's own standard library.

    A folder stands for every `.txt`, `.md` and `.py` file in it. Without a tokenizer tokens are bytes, and a newline
    stands between files; else what ends a text stands there, if the tokenizer has that.
    """
    texts = list(read_texts(paths).values()) if paths else [file.read_bytes() for file in _standard_library()]
    if tokenizer is None:
        return np.frombuffer(b"\n".join(texts), np.uint8)
    end = list(tokenizer.stop_tokens[:1]) or tokenizer.encode("\n", add_special_tokens=False)

    def tokens(text: bytes) -> np.ndarray:
        found = tokenizer.encode(text.decode(errors="replace"), add_special_tokens=False)
        return np.array([*found, *end], np.int32)

    with ThreadPoolExecutor() as pool:  # The library's threads do not hold Python's lock.
        return np.concatenate(list(pool.map(tokens, texts)))


def read_texts(paths: Sequence[str]) -> dict[str, bytes]:
    """The UTF-8 text of each file by its path; a folder stands for every `.txt`, `.md` and `.py` file in it."""
    found = {str(file): _read_text(file) for path in paths for file in _text_files(Path(path))}
    if not any(found.values()):
        raise MeshwrightError(
            f"no text in {', '.join(paths)}; --data takes text files, or folders of .txt, .md or .py files"
        )
    return found


def check_corpus(corpus: np.ndarray, workload: Workload) -> None:
    """Raise where a corpus has not the windows of one batch."""
    wanted = workload.batch * workload.seq_len + 1
    if len(corpus) < wanted:
        unit = "bytes" if corpus.dtype == np.uint8 else "tokens"
        raise MeshwrightError(
            f"the text has {len(corpus):,} {unit}; a batch of {workload.batch} sequences of {workload.seq_len} needs"
            f" {wanted:,}: give more text, a smaller --batch or a shorter --seq-len"
        )


def _read_text(file: Path) -> bytes:
    """The bytes of a file of text; one that holds something else is an error, and so is one of another format."""
    if file.suffix in NOT_TEXT:
        raise MeshwrightError(
            f"{file} is not plain text ({NOT_TEXT[file.suffix]}); --data reads text as it is: take its text out first"
        )
    try:
        data = file.read_bytes()
    except OSError as error:
        raise MeshwrightError(f"cannot read {file}: {error.strerror}") from None
    decoder = codecs.getincrementaldecoder("utf-8")()
    try:
        for start in range(0, len(data), _PIECE):
            decoder.decode(data[start : start + _PIECE], final=start + _PIECE >= len(data))
    except UnicodeDecodeError:
        raise MeshwrightError(
            f"{file} is not UTF-8 text; --data takes text files, or folders of .txt, .md or .py files"
        ) from None
    if (zero := data.find(b"\0")) >= 0:
        raise MeshwrightError(f"{file} is binary (a zero byte at {zero:,}); --data takes text files")
    return data


_PIECE = 1 << 20

NOT_TEXT = {
    ".jsonl": "a JSON object a line",
    ".json": "JSON",
    ".parquet": "Parquet",
    ".arrow": "Arrow",
    ".csv": "a table",
    ".gz": "compressed",
    ".zst": "compressed",
    ".zip": "compressed",
}
"""Files that hold text within another format, which would be learned with it."""


def _text_files(path: Path) -> list[Path]:
    """The file itself, or the text files in a folder, in an order that does not depend on the disk."""
    if path.is_dir():
        return sorted(file for file in path.rglob("*") if file.suffix in (".txt", ".md", ".py") and file.is_file())
    if not path.is_file():
        raise MeshwrightError(
            f"no text file {str(path)!r}; --data takes text files, or folders of .txt, .md or .py files"
        )
    return [path]


def _standard_library() -> list[Path]:
    """The modules of the standard library that lie at its top: about 10 MB of Python on every machine."""
    return sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
