"""Read whole text files, for `meshwright eval`."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from pathlib import Path

from meshwright.errors import MeshwrightError

BYTES = 256
"""Vocabulary size of text read as bytes."""


def read_texts(paths: Sequence[str]) -> dict[str, bytes]:
    """Return {path of a file: its UTF-8 text}. A folder in `paths` means all `.txt`, `.md` and `.py` files in it.

    Raises:
        MeshwrightError: a file cannot be read or is not text, or there is no text.
    """
    texts = {str(file): _read_text(file) for path in paths for file in _text_files(Path(path))}
    if not any(texts.values()):
        raise MeshwrightError(
            f"no text in {', '.join(paths)}; --data takes text files, or folders of .txt, .md or .py files"
        )
    return texts


def _read_text(file: Path) -> bytes:
    """Return the bytes of a text file; a `MeshwrightError` if it is in another format, not UTF-8, or binary."""
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
"""{file suffix: its format} for files that have text together with markup, which the model would learn too."""


def _text_files(path: Path) -> list[Path]:
    """Return the text files in a folder, sorted by path; for the path of a file, this file."""
    if path.is_dir():
        return sorted(file for file in path.rglob("*") if file.suffix in (".txt", ".md", ".py") and file.is_file())
    if not path.is_file():
        raise MeshwrightError(
            f"no text file {str(path)!r}; --data takes text files, or folders of .txt, .md or .py files"
        )
    return [path]
