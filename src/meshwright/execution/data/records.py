"""Read the records of files: text, JSON Lines, Parquet, and Arrow as Hugging Face's `datasets` saves it.

Files are divided into ranges of bytes (text, JSON Lines), of row groups (Parquet) or of record batches (Arrow), so that
several processes can read them in any order. Only a gzip file is one range, because gzip is not seekable.
"""

from __future__ import annotations

import gzip
import io
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal

from meshwright.errors import MeshwrightError
from meshwright.execution.data.bad_data import BadRecordError

Kind = Literal["text", "jsonl", "parquet", "arrow"]
"""The format of a file."""

FORMATS: tuple[Kind, ...] = ("jsonl", "parquet", "arrow")
"""The formats of files that consist of records with fields, unlike text."""

KINDS: Mapping[str, Kind] = {
    ".txt": "text",
    ".md": "text",
    ".py": "text",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".jsonl.gz": "jsonl",
    ".ndjson.gz": "jsonl",
    ".parquet": "parquet",
    ".arrow": "arrow",
}
"""{end of a file's name: its format}."""

UNIT_BYTES = 16 << 20
"""Approximate bytes of files in one unit of work (`shards.Unit`), about a second of tokenising."""

Record = dict[str, Any]


@dataclass(frozen=True)
class Range:
    """A part of a file.

    start, stop: bytes of text and JSON Lines, row groups of Parquet, or record batches of Arrow. A line belongs to the
    range that it begins in. num_bytes: approximate size of the range in the file.
    """

    kind: Kind
    path: str
    start: int
    stop: int
    num_bytes: int

    def place(self, number: int) -> str:
        """Return the location of record `number` (from 0) of the range, for messages: the file, with line or row."""
        if self.kind == "text":
            return self.path
        if self.kind == "jsonl":
            return f"{self.path}, line {_lines_before(self.path, self.start) + number + 1:,}"
        from meshwright.execution.data.tables import rows_before

        before = rows_before(self.path, self.kind, self.start)
        return f"{self.path}, row {before + number + 1:,}"


def kind_of(path: Path) -> Kind | None:
    """Return the format of a file by its name; None if the name does not determine it."""
    return next((kind for end, kind in KINDS.items() if path.name.endswith(end)), None)


def ranges(path: Path, kind: Kind) -> list[Range]:
    """Return the ranges of a file, of about `UNIT_BYTES` each. Raises if the file cannot be read."""
    try:
        size = path.stat().st_size
        if kind in ("text", "jsonl"):
            step = size if path.name.endswith(".gz") else UNIT_BYTES  # gzip is not seekable.
            return [
                Range(kind, str(path), at, min(at + step, size), min(step, size - at))
                for at in range(0, max(size, 1), max(step, 1))
            ]
        from meshwright.execution.data.tables import part_sizes  # Needs the extra [train], which text does not.

        sizes = part_sizes(path, kind)
    except OSError as error:
        raise MeshwrightError(f"cannot read {path}: {error.strerror or error}") from None
    parts, start, num_bytes = [], 0, 0
    for number, part in enumerate(sizes, start=1):
        num_bytes += part
        if num_bytes >= UNIT_BYTES or number == len(sizes):
            parts.append(Range(kind, str(path), start, number, num_bytes))
            start, num_bytes = number, 0
    return parts


def read_records(part: Range) -> Iterator[Record | BadRecordError]:
    """Yield the records of a range in order, and a `BadRecordError` in place of each unreadable record.

    A range of a text file is one record {"text": its text, "is_end": whether the file ends with it}.
    """
    reader: Callable[[Range], Iterator[Record | BadRecordError]] = {
        "text": _read_text,
        "jsonl": _read_lines,
        "parquet": _read_table,
        "arrow": _read_table,
    }[part.kind]
    try:
        yield from reader(part)
    except (OSError, EOFError) as error:
        raise MeshwrightError(f"cannot read {part.path}: {getattr(error, 'strerror', None) or error}") from None


def _read_text(part: Range) -> Iterator[Record | BadRecordError]:
    with Path(part.path).open("rb") as file:
        size = file.seek(0, io.SEEK_END)
        start, stop = (_next_line(file, at, size) for at in (part.start, part.stop))
        file.seek(start)
        data = file.read(stop - start)
    if (zero := data.find(b"\0")) >= 0:
        raise MeshwrightError(f"{part.path} is binary (a zero byte at {start + zero:,}); --data takes text files")
    if start == stop and size:
        return  # No line begins in this range.
    try:
        yield {"text": data.decode(), "is_end": stop == size}
    except UnicodeDecodeError as error:
        yield BadRecordError("invalid_utf8", f"the byte at {start + error.start:,} is not UTF-8")


def _next_line(file: IO[bytes], at: int, size: int) -> int:
    """Return the first byte position from `at` on where a line begins, or `size`, the file's size, if there is none."""
    if at in (0, size):
        return at
    file.seek(at - 1)
    file.readline()
    return file.tell()


def _read_lines(part: Range) -> Iterator[Record | BadRecordError]:
    with gzip.open(part.path) if part.path.endswith(".gz") else Path(part.path).open("rb") as file:
        is_compressed = isinstance(file, gzip.GzipFile)
        at = 0 if is_compressed else _next_line(file, part.start, part.stop)  # pyright: ignore[reportArgumentType]
        file.seek(at)
        while is_compressed or at < part.stop:
            line = file.readline()
            if not line:
                return
            yield _parse_line(line.removeprefix(b"\xef\xbb\xbf") if at == 0 else line)
            at += len(line)


def _parse_line(line: bytes) -> Record | BadRecordError:
    """Return the JSON object on a line, or an error if the line has none."""
    if not line.strip():
        return BadRecordError("empty", "the line is empty")
    try:
        record = _JSON.decode(line.rstrip(b"\r\n").decode())
    except UnicodeDecodeError as error:
        return BadRecordError("invalid_utf8", f"byte {error.start + 1:,} of the line is not UTF-8")
    except BadRecordError as error:
        return error
    except (ValueError, RecursionError) as error:
        return BadRecordError("broken", f"this is not JSON: {error}")
    if not isinstance(record, dict):
        return BadRecordError("broken", f"this is a {type(record).__name__}; each line holds an object")
    return record


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Hook of `json`: return the pairs of an object as a dict. Raises if a key is repeated: libraries differ on it."""
    record = dict(pairs)
    if len(record) < len(pairs):
        key = next(key for number, (key, _) in enumerate(pairs) if key in dict(pairs[:number]))
        raise BadRecordError("broken", f"the key {json.dumps(key)} is given twice in one object")
    return record


_JSON = json.JSONDecoder(object_pairs_hook=_unique_keys)


def _lines_before(path: str, start: int) -> int:
    """Return the number of lines before the first line of the range that begins at byte `start`."""
    if path.endswith(".gz") or start == 0:
        return 0
    count, left = 0, start - 1
    with Path(path).open("rb") as file:
        while left > 0 and (piece := file.read(min(left, 1 << 20))):
            count += piece.count(b"\n")
            left -= len(piece)
    return count + 1


def _read_table(part: Range) -> Iterator[Record | BadRecordError]:
    from meshwright.execution.data.tables import read_rows

    assert part.kind in ("parquet", "arrow")
    return read_rows(part.path, part.kind, part.start, part.stop)
