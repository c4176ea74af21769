"""Checksums of the files of a directory, in the format of `sha256sum -c`.

Several processes that share one directory divide the work: each handles every n-th file, and writes its own checksum
file.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from meshwright.support.files import write_file

NAME = "SHA256SUMS"
_LINE = re.compile(r"([0-9a-f]{64})  (.+)")


def write_checksums(directory: Path, *, part: int = 0, parts: int = 1) -> None:
    """Write the SHA-256 checksums of a process's share of the files in a directory to a file in that directory.

    The share is every `parts`-th file, starting with file `part`, in sorted order. These files are also flushed to
    disk, so that they survive a power failure.
    """
    # Another process may be writing its checksums (`write_file`): with that file, this one would divide other files.
    files = sorted(file for file in _files(directory) if not (file.startswith(".") and file.endswith(".partial")))
    _sign(directory, files[part::parts], _name(part, parts))


def write_left_checksums(directory: Path) -> None:
    """Write the checksums of the files that no process has in its share, if there are any.

    To be called by one process once all have written theirs: a process that listed the files before another had written
    its last one divided other files than they.
    """
    if left := sorted(set(_files(directory)) - _read_checksums(directory).keys()):
        _sign(directory, left, f"{NAME}-left")


def _sign(directory: Path, files: list[str], name: str) -> None:
    """Flush files to disk, and write their checksums to the file `name` of the directory."""
    with ThreadPoolExecutor() as pool:
        digests = pool.map(partial(_digest, flush=True), _paths(directory, files))
        lines = [f"{digest}  {file}\n" for file, digest in zip(files, digests, strict=True)]
    write_file(directory / name, "".join(lines))


def has_checksums(directory: Path, *, parts: int) -> bool:
    """Whether all of `parts` processes have written their checksums."""
    return all((directory / _name(part, parts)).is_file() for part in range(parts))


def _name(part: int, parts: int) -> str:
    return NAME if parts == 1 else f"{NAME}-{part}-of-{parts}"


def find_damage(directory: Path, *, folders: Collection[str] = (), part: int = 0, parts: int = 1) -> str:
    """Return a description of the first damage in the files of a directory; empty if there is none.

    Missing files, changed files, files without a checksum, and damaged checksum files count as damage.

    Args:
        folders: check only files in these folders of the directory, and files in no folder. Default: all files.
        part, parts: the share of the files whose contents are checked, as in `write_checksums`.
    """
    try:
        written = {file: digest for file, digest in _read_checksums(directory).items() if _is_in(file, folders)}
        there = {file for file in _files(directory) if _is_in(file, folders)}
        if lost := sorted(written.keys() - there) or sorted(there - written.keys()):
            return f"{lost[0]} {'is missing' if lost[0] in written else 'has no checksum'}"
        files = sorted(written)[part::parts]
        with ThreadPoolExecutor() as pool:
            for file, digest in zip(files, pool.map(_digest, _paths(directory, files)), strict=True):
                if digest != written[file]:
                    return f"{file} is not what was written"
    except ValueError as error:
        return str(error)
    except OSError as error:
        name = Path(error.filename).relative_to(directory) if error.filename else "it"
        return f"{name} cannot be read: {error.strerror}"
    return ""


def _is_in(file: str, folders: Collection[str]) -> bool:
    """Whether a relative path is below one of the folders, or has no folder. True if no folders are given."""
    folder, slash, _ = file.partition("/")
    return not folders or not slash or folder in folders


def _read_checksums(directory: Path) -> dict[str, str]:
    """Return the digest of each file; raise a ValueError if a checksum file is missing or damaged."""
    found: dict[str, str] = {}
    for path in sorted(directory.glob(f"{NAME}*")):
        text = path.read_bytes().decode(errors="replace")
        matches = [_LINE.fullmatch(line) for line in text.split("\n")[:-1]]
        if not text.endswith("\n") or None in matches:
            raise ValueError(f"{path.name} is not what was written")
        found |= {match[2]: match[1] for match in matches if match}
    if not found:
        raise ValueError(f"{NAME} is missing: it was not written whole, or by an earlier meshwright")
    return found


def _files(directory: Path) -> Iterator[str]:
    """Yield the path, relative to a directory, of each file below it except the checksum files."""
    for path in directory.rglob("*"):
        name = path.relative_to(directory).as_posix()
        if not path.is_dir() and not name.startswith(NAME):
            yield name


def _paths(directory: Path, files: list[str]) -> list[Path]:
    return [directory / file for file in files]


def _digest(path: Path, *, flush: bool = False) -> str:
    with path.open("rb") as file:
        if flush:
            os.fsync(file.fileno())
        return hashlib.file_digest(file, "sha256").hexdigest()
