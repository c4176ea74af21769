"""Compile programs for hardware that is not there: in child processes that have its compiler, cached on disk."""

from __future__ import annotations

import gzip
import hashlib
import importlib.util
import json
import os
import sys
import tempfile
import time
import zlib
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path

import meshwright
from meshwright.compiler.children import Child
from meshwright.compiler.program import CompiledProgram, CompileRequest, program_from_json
from meshwright.compiler.targets import check_compiler, compiler_name
from meshwright.errors import MeshwrightError
from meshwright.hardware import System, parse_system

_CHILD_BYTES = 4 << 30
"""What a process that compiles may take; the largest measured are in docs/verify.md."""

_POLL_SECONDS = 0.05


def compile_in_child(request: CompileRequest) -> CompiledProgram:
    """The compiled program of a request, from the cache where the same one was compiled before.

    The same: equal request, versions of JAX and the compiler, sources of meshwright and of the function's module (not
    of what that module imports in turn). Raises MeshwrightError where the compiler is not installed, the function
    fails, or the program does not fit the memory of the TPUs (the GPU compiler does not check). An interrupt ends the
    child.
    """
    ((_, outcome),) = compile_all([request])
    if isinstance(outcome, MeshwrightError):
        raise outcome
    return outcome


def compile_all(requests: Sequence[CompileRequest]) -> Iterator[tuple[int, CompiledProgram | MeshwrightError]]:
    """The number of each request and its program, or why there is none, as `compile_in_child` has it, as they are done.

    Those in the cache come first. As many are compiled at once as this machine has cores and free memory for.
    """
    waiting: deque[tuple[int, _Wanted]] = deque()
    for number, request in enumerate(requests):
        try:
            wanted = _wanted(request)
        except MeshwrightError as error:
            yield number, error
            continue
        if (found := _read(wanted.file)) is not None:
            yield number, found
        else:
            waiting.append((number, wanted))
    at_once = _num_children()
    running: dict[int, tuple[_Wanted, Child]] = {}
    with ExitStack() as children:
        while waiting or running:
            while waiting and len(running) < at_once:
                number, wanted = waiting.popleft()
                running[number] = wanted, children.enter_context(Child(wanted.request, wanted.system))
            for number in [number for number, (_, child) in running.items() if child.is_done]:
                yield number, _outcome(*running.pop(number))
            time.sleep(_POLL_SECONDS if running else 0)


def cache_directory() -> Path:
    """Where compiled programs are kept: meshwright/programs in $XDG_CACHE_HOME, or in ~/.cache."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "meshwright" / "programs"


@dataclass(frozen=True)
class _Wanted:
    """A request, its hardware, and the file that keeps its program."""

    request: CompileRequest
    system: System
    file: Path


def _wanted(request: CompileRequest) -> _Wanted:
    """A request that can be compiled here. Raises where it cannot."""
    system = parse_system(request.hardware)
    check_compiler(system)
    return _Wanted(request, system, cache_directory() / f"{_key(request, system)}.json.gz")


def _outcome(wanted: _Wanted, child: Child) -> CompiledProgram | MeshwrightError:
    """What a child that is done made, which is kept, or why it made nothing."""
    with child:
        try:
            program = child.program()
        except MeshwrightError as error:
            return error
    _write(wanted.file, program)
    return program


def _num_children() -> int:
    """How many processes may compile at once on this machine, at least one."""
    return max(1, min(os.cpu_count() or 1, _free_bytes() // _CHILD_BYTES))


def _free_bytes() -> int:
    """The memory that new processes can have; where the system does not say, enough for one."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return 0
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")), 0)


def _key(request: CompileRequest, system: System) -> str:
    """The name of a program in the cache, by everything that decides what it is."""
    try:
        asked = json.dumps(request.to_json())
    except TypeError as error:
        raise MeshwrightError(f"the arguments of {request.function} must be plain data, as JSON has: {error}") from None
    parts = [
        asked,
        f"jax {version('jax')}, jaxlib {version('jaxlib')}, {compiler_name(system)}, python {sys.version_info[:2]}",
        _own_sources(),
        _source_of(request.function),
    ]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


@cache
def _own_sources() -> str:
    """A hash over the sources of meshwright."""
    root = Path(meshwright.__file__).parent
    files = sorted(path for path in root.rglob("*") if path.suffix in (".py", ".toml", ".json"))
    digest = hashlib.sha256()
    for path in files:
        digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def _source_of(function: str) -> str:
    """A hash of the file that a function's module is in; '' of one that has none, or is not to be found."""
    try:
        spec = importlib.util.find_spec(function.partition(":")[0])
    except (ImportError, ValueError):
        return ""
    file = Path(spec.origin) if spec and spec.origin else None
    return hashlib.sha256(file.read_bytes()).hexdigest() if file and file.is_file() else ""


def _read(file: Path) -> CompiledProgram | None:
    """The program in a cache file; None where there is none, or none that can be read."""
    try:
        return program_from_json(json.loads(gzip.decompress(file.read_bytes())), cached=True)
    except (OSError, EOFError, zlib.error, ValueError, TypeError):
        return None


def _write(file: Path, program: CompiledProgram) -> None:
    """Keep a program, whole or not at all; a directory that cannot be written keeps nothing."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=file.parent, delete=False) as new:
            new.write(gzip.compress(json.dumps(program.to_json()).encode(), compresslevel=3))
        os.replace(new.name, file)
    except OSError:
        return
