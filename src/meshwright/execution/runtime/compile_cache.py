"""JAX's persistent compilation cache: a command that runs again loads the programs that its first run compiled."""

from __future__ import annotations

import contextlib
import hashlib
import os
import warnings
from pathlib import Path

import jax

from meshwright.errors import MeshwrightError
from meshwright.support.files import user_cache

MAX_BYTES = 4 << 30
"""Maximum size of the cache; the least recently used programs are deleted first."""


def use_compile_cache(where: str | None = None) -> Path | None:
    """Cache the programs that this process compiles in a directory. Call it after JAX has found its devices.

    Args:
        where: a directory; "off" for no cache; None for meshwright/executables in the user's cache directory, unless
          JAX_COMPILATION_CACHE_DIR names another one. Whoever can write there can run code in this process.

    Returns:
        The directory; None if nothing is cached.

    Raises:
        MeshwrightError: `where` is a directory that cannot be written.
    """
    if where == "off":
        jax.config.update("jax_enable_compilation_cache", False)
        return None
    if where is None:
        if jax.config.jax_compilation_cache_dir is not None:  # type: ignore
            return Path(jax.config.jax_compilation_cache_dir)  # type: ignore
        if jax.process_count() > 1 and jax.default_backend() == "gpu":
            # Only process 0 writes. If its files are not shared, the others would compile programs that process 0
            # loads, and wait for its part of the autotuning, which XLA divides among the processes.
            return None
    directory = (user_cache() / "executables" if where is None else Path(where)) / _machine()
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not os.access(directory, os.W_OK | os.X_OK):
            raise PermissionError(13, "Permission denied")
    except OSError as error:
        if where is None:
            return None
        raise MeshwrightError(
            f"--compile-cache {where} cannot be written: {(error.strerror or str(error)).lower()}; give a directory of"
            f" your own, or off"
        ) from None
    for name, value in {
        "jax_enable_compilation_cache": True,
        "jax_compilation_cache_dir": str(directory),
        # JAX would limit the size by reading the whole directory at every write, under a lock of all processes:
        # 0.2 s a program with 5,000 programs.
        "jax_compilation_cache_max_size": -1,
        # Cache every program: a hundred small programs take as long as one large program.
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        # The names of ops are in the key: profiles read them from the compiled program.
        "jax_compilation_cache_include_metadata_in_key": True,
    }.items():
        jax.config.update(name, value)
    _delete_unused(directory)
    # If the disk is full, programs are not cached: the next run is slower, but nothing fails.
    warnings.filterwarnings("ignore", "Error (reading|writing) persistent compilation cache entry")
    return directory


def _delete_unused(directory: Path) -> None:
    """Delete the least recently used programs until the rest has at most `MAX_BYTES`.

    The time of use is the access time if the file system records it, else the time of the last write.
    """
    found: list[tuple[float, int, str]] = []
    with os.scandir(directory) as entries:
        for entry in entries:
            # Another process may delete at the same time.
            with contextlib.suppress(FileNotFoundError):
                # XLA:GPU keeps its autotuning in a folder beside the programs.
                if entry.is_file():
                    stat = entry.stat()
                    found.append((max(stat.st_atime, stat.st_mtime), stat.st_size, entry.path))
    excess = sum(size for _, size, _ in found) - MAX_BYTES
    for _, size, path in sorted(found):
        if excess <= 0:
            return
        Path(path).unlink(missing_ok=True)
        excess -= size


def _machine() -> str:
    """Return a folder name that is equal on machines that can run the same compiled code.

    It is the platform; for CPUs also a hash of the CPU's features, because XLA compiles for its instruction set.
    """
    if jax.default_backend() != "cpu":
        return jax.default_backend()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    features = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return f"cpu-{hashlib.sha256(features.encode()).hexdigest()[:8]}"
