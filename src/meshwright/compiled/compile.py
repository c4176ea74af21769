"""Compile a program for hardware that is not there: in a child process that has its compiler, cached on disk."""

from __future__ import annotations

import gzip
import hashlib
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
import zlib
from dataclasses import replace
from functools import cache
from importlib.metadata import version
from pathlib import Path

import meshwright
from meshwright.compiled.program import CompiledProgram, CompileRequest, program_from_json
from meshwright.compiled.targets import check_compiler, compiler_name, environment
from meshwright.errors import MeshwrightError
from meshwright.hardware import System, parse_system

_MOST_MESSAGES = 1 << 20
_LOGGED = re.compile(r"([IWEF])\d{4} \d\d:\d\d:\d\d")
_OUT_OF_MEMORY = (
    re.compile(r"required for ([\w ]+) \(([\d.]+\w?)\) exceeds available \w+ \(([\d.]+\w?)\)"),
    re.compile(r"(Used) ([\d.]+\w?) of ([\d.]+\w?)"),
)


def compile_in_child(request: CompileRequest) -> CompiledProgram:
    """The compiled program of a request, from the cache where the same one was compiled before.

    The same: equal request, versions of JAX and the compiler, sources of meshwright and of the function's module (not
    of what that module imports in turn). Raises MeshwrightError where the compiler is not installed, the function
    fails, or the program does not fit the memory of the TPUs (the GPU compiler does not check). An interrupt ends the
    child.
    """
    system = parse_system(request.hardware)
    check_compiler(system)
    file = cache_directory() / f"{_key(request, system)}.json.gz"
    found = _read(file)
    if found is None:
        found = _compile(request, system)
        _write(file, found)
    return found


def cache_directory() -> Path:
    """Where compiled programs are kept: meshwright/programs in $XDG_CACHE_HOME, or in ~/.cache."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "meshwright" / "programs"


def _compile(request: CompileRequest, system: System) -> CompiledProgram:
    """The program, compiled in a child process."""
    with tempfile.TemporaryDirectory(prefix="meshwright-") as directory:
        asked, answered, said = (Path(directory) / name for name in ("request.json", "response.json", "stderr"))
        asked.write_text(json.dumps(request.to_json()))
        variables = environment(system, os.environ)
        # What this process can import, the child can: the function may be a test's or a notebook's neighbour.
        variables["PYTHONPATH"] = os.pathsep.join(path or os.getcwd() for path in sys.path)
        command = [sys.executable, "-m", "meshwright.compiled.worker", str(asked), str(answered)]
        with said.open("wb") as log, subprocess.Popen(command, env=variables, stdout=log, stderr=log) as child:
            try:
                status = child.wait()
            finally:
                child.kill()  # after an interrupt, which does not reach it while it is inside the compiler
                child.wait()
        messages = _warnings(said.read_bytes()[-_MOST_MESSAGES:].decode(errors="replace"))
        if not answered.exists():
            raise MeshwrightError(_died(request, status, messages))
        response = json.loads(answered.read_text())
    if "error" in response:
        raise MeshwrightError(response["error"] if response["known"] else _failed(request, response["error"]))
    return replace(program_from_json(response["program"], cached=False), messages=messages)


def _warnings(messages: str) -> str:
    """What a compiler wrote, without the messages that only inform, which may go over several lines."""
    kept, informs = [], False
    for line in messages.splitlines(keepends=True):
        if found := _LOGGED.match(line):
            informs = found[1] == "I"
        if not informs:
            kept.append(line)
    return "".join(kept)


def _failed(request: CompileRequest, error: str) -> str:
    """One line on an error of the user's function or of the compiler."""
    what = f"{request.function} on {request.hardware}"
    if "RESOURCE_EXHAUSTED" in error:
        for pattern in _OUT_OF_MEMORY:
            if found := pattern.search(error):
                kind = "" if found[1] == "Used" else f" for {found[1]}"
                return f"{what} does not fit: it needs {found[2]}{kind} of the {found[3]} a device has"
    first = error.strip().split("\n")[0]
    return f"{what} does not compile: {first}"


def _died(request: CompileRequest, status: int, messages: str) -> str:
    """One line on a child that ended without an answer."""
    how = f"signal {-status}" if status < 0 else f"status {status}"
    last = next((line for line in reversed(messages.splitlines()) if line.strip()), "it said nothing")
    return f"the process compiling {request.function} for {request.hardware} ended with {how}: {last.strip()[:200]}"


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
