"""Read the rows of Parquet and Arrow files, by ranges of row groups or record batches.

`records` imports this module only to read such a file, because it needs the extra [train].
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq

from meshwright.errors import MeshwrightError
from meshwright.execution.data.bad_data import BadRecordError

Format = Literal["parquet", "arrow"]

ROWS = 256
"""Number of rows of a table that are converted to Python objects at once."""


def part_sizes(path: Path, form: Format) -> list[int]:
    """Return the number of bytes of each row group of a Parquet file, or of each record batch of an Arrow file.

    Raises:
        MeshwrightError: the file is damaged or of another format.
    """
    try:
        if form == "parquet":
            metadata = pq.read_metadata(path)
            return [metadata.row_group(number).total_byte_size for number in range(metadata.num_row_groups)]
        with pa.memory_map(str(path)) as source:
            return [batch.nbytes for batch in _batches(source)]
    except pa.ArrowException as error:
        name = "Parquet" if form == "parquet" else "Arrow"
        raise MeshwrightError(f"{path} is no {name} file: {str(error).splitlines()[0]}") from None


def rows_before(path: str, form: Format, part: int) -> int:
    """Return the number of rows before row group, or record batch, number `part` of a file."""
    if form == "parquet":
        metadata = pq.read_metadata(path)
        return sum(metadata.row_group(number).num_rows for number in range(part))
    with pa.memory_map(path) as source:
        return sum(batch.num_rows for batch, _ in zip(_batches(source), range(part), strict=False))


def read_rows(path: str, form: Format, start: int, stop: int) -> Iterator[dict[str, Any] | BadRecordError]:
    """Yield the rows of row groups, or record batches, `start` to `stop` (excluded) in order.

    A row is {column: value}; in place of an unreadable row, a `BadRecordError` is yielded.
    """
    try:
        if form == "parquet":
            with pq.ParquetFile(path) as file:
                for batch in file.iter_batches(ROWS, row_groups=[*range(start, stop)]):
                    yield from _rows(batch)
        else:
            yield from _read_arrow(path, start, stop)
    except pa.ArrowException as error:
        raise MeshwrightError(f"cannot read {path}: {str(error).splitlines()[0]}") from None


def _read_arrow(path: str, start: int, stop: int) -> Iterator[dict[str, Any] | BadRecordError]:
    with pa.memory_map(path) as source:
        for number, batch in enumerate(_batches(source)):
            if number >= stop:
                return
            if number >= start:
                for at in range(0, batch.num_rows, ROWS):
                    yield from _rows(batch.slice(at, ROWS))


def _batches(source: pa.MemoryMappedFile) -> Iterator[pa.RecordBatch]:
    """Yield the record batches of an Arrow file, in Arrow's stream format or file format."""
    is_indexed = source.read(6) == b"ARROW1"
    source.seek(0)
    if not is_indexed:
        yield from pa.ipc.open_stream(source)
        return
    reader = pa.ipc.open_file(source)
    yield from (reader.get_batch(number) for number in range(reader.num_record_batches))


def _rows(batch: pa.RecordBatch) -> Iterator[dict[str, Any] | BadRecordError]:
    """Yield the rows of a batch, and a `BadRecordError` in place of each row with text that is not UTF-8."""
    try:
        yield from batch.to_pylist()
        return
    except UnicodeDecodeError:
        pass
    for at in range(batch.num_rows):
        try:
            yield batch.slice(at, 1).to_pylist()[0]
        except UnicodeDecodeError as error:
            yield BadRecordError("invalid_utf8", f"a text of the row is not UTF-8 at its byte {error.start + 1:,}")
