"""A child process that compiles one program."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Self

from meshwright.description.hardware.system import System
from meshwright.errors import DoesNotFitError, MeshwrightError
from meshwright.proof.compiler.program import CompiledProgram, CompileRequest, Failure, FailureKind, program_from_json
from meshwright.proof.compiler.targets import environment

_MOST_MESSAGES = 1 << 20
_LOGGED = re.compile(r"([IWEF])\d{4} \d\d:\d\d:\d\d")


class CompileProcess:
    """A child process that compiles a request; leaving its context ends the process and deletes its files."""

    def __init__(self, request: CompileRequest, system: System) -> None:
        self.request = request
        self.directory = tempfile.TemporaryDirectory(prefix="meshwright-")
        asked, self.answered, self.said = (
            Path(self.directory.name) / name for name in ("request.json", "response.json", "stderr")
        )
        asked.write_text(json.dumps(request.to_json()))
        variables = environment(system, os.environ)
        # The child imports from the same paths: the function may be in a file beside a test or a notebook.
        variables["PYTHONPATH"] = os.pathsep.join(path or os.getcwd() for path in sys.path)
        command = [
            sys.executable,
            "-m",
            "meshwright.proof.compiler.worker",
            str(asked),
            str(self.answered),
            str(os.getpid()),
        ]
        with self.said.open("wb") as log:
            self.process = subprocess.Popen(command, env=variables, stdout=log, stderr=log)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()  # after an interrupt, which does not reach it while it is inside the compiler
        self.process.wait()
        self.directory.cleanup()

    @property
    def is_done(self) -> bool:
        """Whether the process has ended."""
        return self.process.poll() is not None

    def program(self) -> CompiledProgram:
        """Wait for the process and return the compiled program. Raises if compilation failed or the process died."""
        status = self.process.wait()
        # Informational messages, which may span several lines, are left out.
        kept, informs = [], False
        for line in self.said.read_bytes()[-_MOST_MESSAGES:].decode(errors="replace").splitlines(keepends=True):
            if found := _LOGGED.match(line):
                informs = found[1] == "I"
            if not informs:
                kept.append(line)
        messages = "".join(kept)
        if not self.answered.exists():
            how = f"signal {-status}" if status < 0 else f"status {status}"
            last = next((line for line in reversed(messages.splitlines()) if line.strip()), "it said nothing")
            raise MeshwrightError(
                f"the process compiling {self.request.function} for {self.request.hardware} ended with {how}:"
                f" {last.strip()[:200]}"
            )
        response = json.loads(self.answered.read_text())
        if "error" in response:
            raise compile_error(f"{self.request.function} on {self.request.hardware}", Failure(**response["error"]))
        return replace(program_from_json(response["program"], cached=False), messages=messages)


def compile_error(what: str, failure: Failure) -> MeshwrightError:
    """Return the exception for a failed compilation. what: the name of the program in the exception's message."""
    if failure.kind == FailureKind.REFUSED:
        return MeshwrightError(failure.message)
    if failure.kind == FailureKind.OUT_OF_MEMORY:
        memory = f" for {failure.memory}" if failure.memory else ""
        needs = f"it needs {failure.needed}{memory} of the {failure.available} a device has"
        return DoesNotFitError(f"{what} does not fit: {needs}", failure.hlo)
    if "cuDNN not found" in failure.message:
        return MeshwrightError(
            f"{what} does not compile: attention='cudnn' is planned by cuDNN, which is not installed;"
            f" pip install meshwright[gpu-compiler], or take --attention scores"
        )
    first = failure.message.strip().split("\n")[0]
    return MeshwrightError(f"{what} does not compile: {first}")
