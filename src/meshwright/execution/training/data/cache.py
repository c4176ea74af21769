"""Cache of prepared data on disk: one process of a machine makes the data of a key, once."""

from __future__ import annotations

import fcntl
import hashlib
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from meshwright.errors import MeshwrightError
from meshwright.support.checksums import find_damage, write_checksums
from meshwright.support.files import user_cache, write_error

CHECKED_BYTES = 4 << 30
"""The checksums of larger directories are not compared, because this takes 7 s on one core for this many bytes."""


def cache_directory() -> Path:
    """Return the directory of cached token stores: meshwright/tokens in $XDG_CACHE_HOME, or in ~/.cache."""
    return user_cache() / "tokens"


@contextmanager
def locked_directory(key: str) -> Iterator[Path]:
    """Yield the directory of a cache key, locked inside the context. The directory may not exist yet."""
    directory = cache_directory() / hashlib.sha256(key.encode()).hexdigest()[:32]
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        lock = directory.with_suffix(".lock").open("w")
    except OSError as error:
        raise write_error(directory, error) from None
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield directory


def cached_directory(key: str, make: Callable[[Path], None]) -> Path:
    """Return the directory of a key. If it does not exist, `make` writes its files; one that exists is complete.

    Raises:
        MeshwrightError: the directory cannot be written, or its files have changed since they were written (not checked
            for more than `CHECKED_BYTES`).
    """
    with locked_directory(key) as directory:
        if not directory.is_dir():
            partial = directory.with_suffix(".partial")
            shutil.rmtree(partial, ignore_errors=True)  # Left by a process that was killed.
            try:
                partial.mkdir()
                make(partial)
                write_checksums(partial)
                partial.rename(directory)
            except OSError as error:
                raise write_error(directory, error) from None
            finally:
                shutil.rmtree(partial, ignore_errors=True)
        elif sum(path.stat().st_size for path in directory.iterdir()) <= CHECKED_BYTES and (
            damage := find_damage(directory)
        ):
            raise MeshwrightError(f"{directory} is damaged: {damage}; delete it, and the run makes it anew")
        return directory
