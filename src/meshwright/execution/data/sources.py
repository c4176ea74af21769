"""Find data sources by path: the files of a source, their format, and the weight of a source in a mixture."""

from __future__ import annotations

import glob
import json
import math
import os
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from meshwright.errors import MeshwrightError
from meshwright.execution.data.bad_data import BadRecordError
from meshwright.execution.data.records import FORMATS, Kind, Record, kind_of, ranges, read_records
from meshwright.execution.data.store import is_store

TAKES = (
    "--data takes .txt, .md, .py, .jsonl, .parquet and .arrow files, folders and patterns (*.jsonl) of them, and what"
    " `tokenize` writes"
)


class Weighted(NamedTuple):
    """The path of a source, and its weight in a mixture; None if no weight is given."""

    path: str
    weight: float | None


@dataclass(frozen=True)
class FileSource:
    """Files of one format. name: the path or pattern as the user gave it."""

    name: str
    kind: Kind
    files: tuple[Path, ...]

    def first_record(self) -> Record:
        """Return the first record that can be read. Raises if there is none."""
        why = ""
        for part in (part for path in self.files for part in ranges(path, self.kind)):
            for number, record in enumerate(read_records(part)):
                if not isinstance(record, BadRecordError):
                    return record
                why = why or f": {part.place(number)}: {record}"
        raise MeshwrightError(f"{self.name} has no record that can be read{why}")


@dataclass(frozen=True)
class StoreSource:
    """A directory with a token store. name: the path as the user gave it."""

    name: str
    directory: Path


def parse_source(text: str) -> Weighted:
    """Return the path and the weight of a source given as `wiki.jsonl=0.7` or `wiki.jsonl`.

    Raises:
        MeshwrightError: the weight is not a number above 0.
    """
    path, equals, weight = text.rpartition("=")
    if not equals or Path(text).exists():
        return Weighted(text, None)
    try:
        value = float(weight)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise MeshwrightError(f"the weight of {path} is {weight!r}; it is a number above 0, as {path}=0.7")
    return Weighted(path, value)


def parse_sources(texts: tuple[str, ...]) -> list[Weighted]:
    """Return the path and the weight of each source of a run. Raises if only some have weights, or one is repeated."""
    sources = [parse_source(text) for text in texts]
    without = [path for path, weight in sources if weight is None]
    if 0 < len(without) < len(sources):
        raise MeshwrightError(f"{without[0]} has no weight, and other sources have; {without[0]}=1 gives it one")
    if len({path for path, _ in sources}) < len(sources):
        raise MeshwrightError(f"a source is given twice: {', '.join(path for path, _ in sources)}")
    return sources


def find_files(names: tuple[str, ...]) -> FileSource:
    """Return the files at several paths as one source.

    Raises:
        MeshwrightError: the files have several formats, a file is given twice, or a path is a token store.
    """
    sources = [find_source(name) for name in names]
    files = [one for one in sources if isinstance(one, FileSource)]
    if stores := [one for one in sources if isinstance(one, StoreSource)]:
        raise MeshwrightError(f"{stores[0].name} holds tokens already; `meshwright train --data` takes it as it is")
    if len(kinds := sorted({one.kind for one in files})) > 1:
        raise MeshwrightError(
            f"{', '.join(names)} are of several formats ({', '.join(kinds)}); tokenise each by itself"
        )
    paths = [path for one in files for path in one.files]
    if twice := next((path for path, count in Counter(path.resolve() for path in paths).items() if count > 1), None):
        raise MeshwrightError(f"{twice} is given twice, by {', '.join(names)}; name each file once")
    return FileSource(" ".join(names), files[0].kind, tuple(paths))


def find_source(name: str) -> FileSource | StoreSource:
    """Return the source at a path.

    The path is a file; a pattern (`wiki/*.jsonl`), for all matching files; or a folder. A folder is a token store, a
    data set saved by Hugging Face's `datasets`, or stands for all files in it: those of JSON Lines, Parquet or Arrow if
    there are any, else text files.

    Raises:
        MeshwrightError: there is nothing at the path, or nothing that can be read.
    """
    path = Path(name)
    if is_store(path):
        return StoreSource(name, path)
    if (path / "unfinished.json").is_file():
        raise MeshwrightError(f"{name} holds a part of a store; the same `meshwright tokenize` again makes the rest")
    if path.is_dir():
        return _find_in_folder(name, path)
    if path.is_symlink() and not path.exists():
        raise MeshwrightError(f"{name} is a link to {os.readlink(path)}, which is not there")
    if path.exists() and not path.is_file():
        raise MeshwrightError(f"{name} is not a regular file, but a device, a pipe or a socket; {TAKES}")
    if not path.is_file():
        if matches := sorted(glob.glob(name, recursive=True)):
            return replace(find_files(tuple(matches)), name=name)
        raise MeshwrightError(f"there is no file {name!r}; {TAKES}")
    if (kind := kind_of(path)) is None:
        if why := NOT_DATA.get(path.suffix):
            raise MeshwrightError(f"{name} is {why}; {TAKES}")
        kind = "text"
    return FileSource(name, kind, (path,))


NOT_DATA = {
    ".json": "one JSON text, not an object a line (.jsonl)",
    ".csv": "a table of text",
    ".tsv": "a table of text",
    ".gz": "compressed",
    ".zst": "compressed",
    ".zip": "compressed",
    ".bz2": "compressed",
    ".xz": "compressed",
    ".npy": "an array",
    ".bin": "binary",
    ".safetensors": "weights",
}
"""{suffix of files that are not read as text, because a model would learn their format too: what they are}."""


def _find_in_folder(name: str, path: Path) -> FileSource:
    if (path / "dataset_dict.json").is_file():
        splits = _json(path / "dataset_dict.json").get("splits") or []
        first = path / str(splits[0]) if splits else path
        raise MeshwrightError(f"{name} holds the splits {', '.join(map(str, splits))}; name one of them, as {first}")
    if (path / "state.json").is_file():
        listed = _json(path / "state.json").get("_data_files") or []
        files = tuple(path / entry["filename"] for entry in listed)
        if missing := [file for file in files if not file.is_file()]:
            raise MeshwrightError(f"{name} has no {missing[0].name}, which its state.json names")
        if _json(path / "state.json").get("_indices_data_files"):
            raise MeshwrightError(f"{name} was saved with an index over its rows; save flatten_indices() of it")
        return FileSource(name, "arrow", files)
    visible = (file for file in path.rglob("*") if not any(part[0] == "." for part in file.relative_to(path).parts))
    files = sorted(file for file in visible if kind_of(file) and file.is_file())
    present = {kind_of(file) for file in files}
    kinds: list[Kind] = [kind for kind in FORMATS if kind in present]
    if len(kinds) > 1:
        raise MeshwrightError(f"{name} holds files of {' and '.join(kinds)}; name those to read")
    kind: Kind = kinds[0] if kinds else "text"
    if not (files := [file for file in files if kind_of(file) == kind]):
        raise MeshwrightError(f"no data in {name}; {TAKES}")
    return FileSource(name, kind, tuple(files))


def _json(path: Path) -> Record:
    """Return the object in a JSON file; an empty one if the file holds something else. Raises if it is not JSON."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise MeshwrightError(f"cannot read {path}: {error}") from None
    return data if isinstance(data, dict) else {}
