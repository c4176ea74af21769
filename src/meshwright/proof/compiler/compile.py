"""Compile programs in child processes that have the target's compiler environment, with a cache on disk."""

from __future__ import annotations

import gzip
import hashlib
import importlib.util
import json
import os
import sys
import time
import zlib
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path

import meshwright
from meshwright.description.hardware.system import System, parse_system
from meshwright.errors import MeshwrightError
from meshwright.proof.compiler.process import CompileProcess
from meshwright.proof.compiler.program import CompiledProgram, CompileRequest, program_from_json
from meshwright.proof.compiler.targets import check_compiler, compiler_name
from meshwright.support.files import user_cache, write_file

_CHILD_BYTES = 4 << 30
"""Memory budget of one compiling process, in bytes; docs/verify.md has the largest measured."""

_POLL_SECONDS = 0.05


def compile_in_child(request: CompileRequest) -> CompiledProgram:
    """Compile a request, or read its program from the cache.

    The cache key hashes the request, the versions of JAX and of the compiler, and the sources of meshwright and of the
    function's module (not of modules that it imports). An interrupt ends the child.

    Raises:
        MeshwrightError: the compiler is not installed, the function fails, or the program does not fit a TPU's memory
            (the GPU compiler does not check that).
    """
    ((_, outcome),) = compile_all([request])
    if isinstance(outcome, MeshwrightError):
        raise outcome
    return outcome


def compile_all(requests: Sequence[CompileRequest]) -> Iterator[tuple[int, CompiledProgram | MeshwrightError]]:
    """Compile requests in parallel; yield (request's index, program or error) as each is done, cached ones first.

    One process per core runs at once, as far as memory allows. Errors are those of `compile_in_child`.
    """
    waiting: deque[tuple[int, _Job]] = deque()
    for number, request in enumerate(requests):
        try:
            system = parse_system(request.hardware)
            check_compiler(system)
            job = _Job(request, system, cache_directory() / f"{_key(request, system)}.json.gz")
        except MeshwrightError as error:
            yield number, error
            continue
        if (found := _read(job.file)) is not None:
            yield number, found
        else:
            waiting.append((number, job))
    at_once = max(1, min(os.cpu_count() or 1, _free_bytes() // _CHILD_BYTES))
    running: dict[int, tuple[_Job, CompileProcess]] = {}
    with ExitStack() as children:
        while waiting or running:
            while waiting and len(running) < at_once:
                number, job = waiting.popleft()
                running[number] = job, children.enter_context(CompileProcess(job.request, job.system))
            for number in [number for number, (_, child) in running.items() if child.is_done]:
                yield number, _outcome(*running.pop(number))
            time.sleep(_POLL_SECONDS if running else 0)


def cache_directory() -> Path:
    """Where compiled programs are cached: meshwright/programs in $XDG_CACHE_HOME, or in ~/.cache."""
    return user_cache() / "programs"


@dataclass(frozen=True)
class _Job:
    """A request, its hardware, and its cache file."""

    request: CompileRequest
    system: System
    file: Path


def _outcome(job: _Job, child: CompileProcess) -> CompiledProgram | MeshwrightError:
    """Cache and return the program of a finished process, or return its error."""
    with child:
        try:
            program = child.program()
        except MeshwrightError as error:
            return error
    with suppress(OSError, MeshwrightError):  # a read-only directory caches nothing
        job.file.parent.mkdir(parents=True, exist_ok=True)
        write_file(job.file, gzip.compress(json.dumps(program.to_json()).encode(), compresslevel=3))
    return program


def _free_bytes() -> int:
    """Return the bytes of memory available to new processes; 0 if unknown."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return 0
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")), 0)


def _key(request: CompileRequest, system: System) -> str:
    """Return the cache key of a request: a hash of everything its program depends on."""
    try:
        request_text = json.dumps(request.to_json())
    except TypeError as error:
        raise MeshwrightError(f"the arguments of {request.function} must be plain data, as JSON has: {error}") from None
    parts = [
        request_text,
        f"jax {version('jax')}, jaxlib {version('jaxlib')}, {compiler_name(system)}, python {sys.version_info[:2]}",
        _own_sources(),
        _source_of(request.function),
    ]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


@cache
def _own_sources() -> str:
    """Return a hash over the source and data files of meshwright."""
    root = Path(meshwright.__file__).parent
    files = sorted(path for path in root.rglob("*") if path.suffix in (".py", ".toml", ".json"))
    digest = hashlib.sha256()
    for path in files:
        digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def _source_of(function: str) -> str:
    """Return a hash of the file of a function's module; '' if there is no such file."""
    try:
        spec = importlib.util.find_spec(function.partition(":")[0])
    except (ImportError, ValueError):
        return ""
    file = Path(spec.origin) if spec and spec.origin else None
    return hashlib.sha256(file.read_bytes()).hexdigest() if file and file.is_file() else ""


def _read(file: Path) -> CompiledProgram | None:
    """Return the program in a cache file; None if the file is missing or cannot be read."""
    try:
        return program_from_json(json.loads(gzip.decompress(file.read_bytes())), cached=True)
    except (OSError, EOFError, zlib.error, ValueError, TypeError):
        return None
