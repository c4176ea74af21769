"""Write files completely or not at all, replacing only regular files; each failure is a one-line error.

Character devices and pipes (`/dev/null`, `/dev/stdout`, a FIFO with a reader) are written to directly.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import shutil
import stat
import sys
import tempfile
from pathlib import Path

from meshwright.errors import MeshwrightError
from meshwright.units import show_bytes

_REASONS = {
    errno.ENOENT: "there is no directory {parent}",
    errno.ENOTDIR: "{parent} is not a directory",
    errno.EISDIR: "it is a directory",
    errno.EROFS: "its file system is read-only",
    errno.EACCES: "permission denied",
    errno.EPERM: "permission denied",
    errno.ENAMETOOLONG: "its name is too long",
    errno.ELOOP: "its symbolic links go in a circle",
    errno.ENXIO: "nothing reads this pipe yet",
    errno.ENOSPC: "the disk is full{free}",
    errno.EDQUOT: "your disk quota is used up",
    errno.EFBIG: "a file is larger than it may be (ulimit -f)",
}

_OPEN_DESCRIPTOR = re.compile(r"/dev/std(?:out|err)|/(?:dev|proc/self)/fd/\d+")


def as_path(path: object) -> Path:
    """Return `path` as a `Path`; raise if it is not a path."""
    if not isinstance(path, str | os.PathLike):
        raise MeshwrightError(f"path is {path!r}; it is the path of a file, as text or a pathlib.Path")
    return Path(path)


def write_error(path: str | Path, error: OSError | ValueError) -> MeshwrightError:
    """Return the one-line error for a path that could not be written; a ValueError means that the path is invalid."""
    if not isinstance(error, OSError):
        return MeshwrightError(f"cannot write {str(path)!r}: {error}")
    reason = _REASONS.get(error.errno or 0, error.strerror or str(error))
    if error.errno == errno.ENOENT and Path(path).parent.is_dir():  # The directory takes no files, as in /proc.
        reason = "no file can be made in {parent}"
    free = ""
    if error.errno == errno.ENOSPC and not Path(path).is_char_device():
        disk = Path(path)
        while not disk.exists():
            disk = disk.parent
        free = f", {show_bytes(shutil.disk_usage(disk).free)} are free"
    return MeshwrightError(f"cannot write {path}: {reason.format(parent=Path(path).parent, free=free)}")


def check_outputs(*paths: str | Path | None) -> None:
    """Raise, before any work is done, if a path cannot be written or two paths lead to the same file."""
    given = [Path(path) for path in paths if path is not None]
    for number, path in enumerate(given):
        check_output(path)
        is_file = not _is_written_directly(path, _mode(path))
        if is_file and os.path.realpath(path) in map(os.path.realpath, given[:number]):
            raise MeshwrightError(f"cannot write {path} twice, for two things; give each a name of its own")


def check_output(path: str | Path) -> None:
    """Raise, before anything is computed for it, if a file cannot be written to a path."""
    path = Path(path)
    if str(path) == "-":
        raise MeshwrightError("cannot write a file with the name -; to the terminal or a pipe it is /dev/stdout")
    try:
        kind = _mode(path)
        if _is_written_directly(path, kind):
            if kind is None or not stat.S_ISFIFO(kind):  # Opening and closing a pipe would end its reader.
                os.close(_open_directly(path))
            return
        if path == Path():
            raise MeshwrightError("cannot write a file without a name")
        if kind is not None:
            if not stat.S_ISREG(kind):
                what = "a directory" if stat.S_ISDIR(kind) else "not a regular file"
                raise MeshwrightError(f"cannot write {path}: it is {what}")
            if not os.access(path, os.W_OK):
                raise OSError(errno.EACCES, "")
        _try_directory(Path(os.path.realpath(path)).parent)
    except (OSError, ValueError) as error:
        raise error if isinstance(error, MeshwrightError) else write_error(path, error) from None


def check_new_directory(path: str | Path) -> None:
    """Raise if a directory, and files in it, could not be created at a path. The directory may already exist."""
    path = Path(path)
    try:
        if path == Path():
            raise MeshwrightError("cannot make a directory without a name")
        for name in path.parts:
            if len(os.fsencode(name)) > os.pathconf("/", "PC_NAME_MAX"):
                raise MeshwrightError(f"cannot make the directory {path}: its name is too long")
        there = path
        while (kind := _mode(there)) is None:
            there = there.parent
        if not stat.S_ISDIR(kind):
            raise MeshwrightError(f"cannot make the directory {path}: {there} is not a directory")
        _try_directory(there)
    except (OSError, ValueError) as error:
        raise error if isinstance(error, MeshwrightError) else write_error(path, error) from None


def write_file(path: str | Path, content: str | bytes) -> None:
    """Write a file completely or not at all, by renaming a temporary file; symbolic links are followed."""
    path = Path(path)
    check_output(path)
    data = content if isinstance(content, bytes) else content.encode(errors="backslashreplace")
    try:
        kind = _mode(path)
        if _is_written_directly(path, kind):
            sys.stdout.flush()  # Earlier prints come first if both are the same stream.
            with os.fdopen(_open_directly(path), "wb") as file:
                file.write(data)
            return
        target = Path(os.path.realpath(path))
        # A short name, so that even the longest allowed file name does not become too long.
        partial = target.with_name(f".{secrets.token_hex(4)}.partial")
        try:
            with partial.open("xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            if kind is not None:
                partial.chmod(stat.S_IMODE(kind))
            partial.replace(target)
        finally:
            partial.unlink(missing_ok=True)
    except OSError as error:
        raise write_error(path, error) from None


def append_line(path: Path, line: str) -> None:
    """Append a line to a file, created if missing. A line that fits only in part on the disk is removed again."""
    append_bytes(path, line.encode() + b"\n")


def append_bytes(path: Path, data: bytes) -> None:
    """Append bytes to a file, as `append_line` does a line. Raises if the file cannot be written."""
    try:
        with path.open("ab", buffering=0) as file:
            before = file.tell()
            if (written := file.write(data)) != len(data):
                file.truncate(before)
                raise OSError(errno.ENOSPC, f"{written} of {len(data)} bytes fit")
    except OSError as error:
        raise write_error(path, error) from None


def user_cache() -> Path:
    """Return the directory of meshwright's cache: in $XDG_CACHE_HOME, or in ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "meshwright"


def _mode(path: Path) -> int | None:
    """Return the mode (type and permissions) of a path, following links; None if it does not exist."""
    try:
        return path.stat().st_mode
    except FileNotFoundError:
        return None


def _is_written_directly(path: Path, mode: int | None) -> bool:
    """Whether a path is a stream to write to directly: a device, a pipe, or an open descriptor. mode: from `_mode`."""
    if _OPEN_DESCRIPTOR.fullmatch(str(path)):
        return True
    return mode is not None and (stat.S_ISCHR(mode) or stat.S_ISFIFO(mode))


def _open_directly(path: Path) -> int:
    """Return a descriptor open for writing; a pipe without a reader raises instead of blocking."""
    if _OPEN_DESCRIPTOR.fullmatch(str(path)):
        number = {"stdout": 1, "stderr": 2}.get(path.name)
        return os.dup(int(path.name) if number is None else number)
    descriptor = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY)
    os.set_blocking(descriptor, True)
    return descriptor


def _try_directory(directory: Path) -> None:
    """Raise OSError if no file can be created in a directory. The trial file has no name where the system allows it."""
    with tempfile.TemporaryFile(dir=directory):
        pass
