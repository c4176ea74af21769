"""The process that compiles one program: `python -m meshwright.proof.compiler.worker REQUEST RESPONSE PARENT`.

REQUEST and RESPONSE are JSON files. `process.CompileProcess` starts it with the environment of the target's compiler.
The response is {"program": ...} or {"error": ...}, the fields of `Failure`.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import signal
import sys
import tempfile
import time
import traceback
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import jax

import meshwright
from meshwright.description.hardware.system import parse_system
from meshwright.description.hlo.text import hlo_text
from meshwright.description.hlo.versions import untested_notes
from meshwright.errors import MeshwrightError
from meshwright.execution.runtime.program_memory import program_memory
from meshwright.proof.compiler.devices import make_device_mesh
from meshwright.proof.compiler.load import load_function
from meshwright.proof.compiler.module import output_names
from meshwright.proof.compiler.program import (
    CompiledProgram,
    CompileRequest,
    Failure,
    FailureKind,
    LoweredProgram,
    MeshMethod,
)
from meshwright.proof.compiler.targets import compiler_name, compiler_options, gpu_capability

_DUMPED_PASSES = "shardy-xla|spmd-partitioning"

# These passes have the same names for CPU, TPU and GPU except for a prefix; other passes do not.
_DUMPS = {
    "annotated": re.compile(r"\.before_[\w-]*shardy-xla\."),
    "propagated": re.compile(r"\.before_[\w-]*spmd-partitioning\."),
    "partitioned": re.compile(r"\.after_[\w-]*spmd-partitioning\."),
}

PR_SET_PDEATHSIG = 1
"""Option of prctl(2): the signal that the system sends this process when its parent has ended."""

# Messages of the TPU and the GPU compiler.
_OUT_OF_MEMORY = (
    re.compile(r"required for ([\w ]+) \(([\d.]+\w?)\) exceeds available \w+ \(([\d.]+\w?)\)"),
    re.compile(r"(Used) ([\d.]+\w?) of ([\d.]+\w?)"),
)


def main(request_file: str, response_file: str, parent: str) -> int:
    """Compile a request and write the response. Return 1 after an error, else 0.

    parent: process id of the requester. This worker exits when the requester does, which may be killed before it can
    stop the worker.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(parent):
        return 1
    try:
        request = CompileRequest(**json.loads(Path(request_file).read_text()))
        response: dict[str, Any] = {"program": run(request).to_json()}
    except MeshwrightError as error:
        response = {"error": asdict(Failure(kind=FailureKind.REFUSED, message=str(error)))}
    except Exception as error:  # from the user's function or the compiler; the parent process reports it
        traceback.print_exc()
        response = {"error": asdict(failure_of(error))}
    Path(response_file).write_text(json.dumps(response))
    return int("error" in response)


def run(request: CompileRequest) -> CompiledProgram:
    """Compile a request in this process, which must have the environment (`targets.environment`) of its hardware.

    Raises:
        MeshwrightError: the request's function does not return a lowered program.
        CompileError: the compiler fails.
    """
    system = parse_system(request.hardware)
    mesh, mesh_method = make_device_mesh(system, request.mesh)
    if system.chip.kind == "gpu":
        _declare_capability(gpu_capability(system))
    program = load_function(request.function)(mesh, **request.arguments)
    if isinstance(program, jax.stages.Lowered):
        program = LoweredProgram(program)
    if not isinstance(program, LoweredProgram):
        raise MeshwrightError(
            f"{request.function} returned {type(program).__name__}; it must return jax.jit(...).lower(...)"
        )
    options = compiler_options(system, request.effort)
    return compile_lowered(program, options=options, compiler=compiler_name(system), mesh_method=mesh_method)


def _declare_capability(capability: tuple[int, int]) -> None:
    """Make JAX take `capability` as that of the process's GPUs, by which it limits the heads of cuDNN's attention.

    JAX (0.10.2 to 0.12.0.1) asks the process's own devices, which are CPUs here, and has no argument for it.
    """
    from jax._src.cudnn import fused_attention_stablehlo  # Imported late: only GPUs need it.

    def has_capability(least: str) -> bool:
        return capability >= tuple(map(int, least.split(".")))

    fused_attention_stablehlo.check_compute_capability = has_capability


class CompileError(Exception):
    """The compiler failed on a program; `__cause__` is its error. hlo: the optimized module, '' if it dumped none."""

    def __init__(self, hlo: str) -> None:
        super().__init__()
        self.hlo = hlo


def compile_lowered(
    program: LoweredProgram, *, options: dict[str, Any], compiler: str, mesh_method: MeshMethod
) -> CompiledProgram:
    """Compile a lowered program in this process, with XLA options.

    Warnings of the compiler go to this process's stderr.

    Args:
      program: the lowered program.
      options: XLA's compiler options.
      compiler: name and version, to be recorded.
      mesh_method: how the mesh was arranged, to be recorded.

    Raises:
        CompileError: the compilation fails; the error has the optimized module, if there was one.
    """
    start = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="meshwright-") as directory:
        try:
            dump = {"xla_dump_to": directory, "xla_dump_hlo_pass_re": _DUMPED_PASSES}
            compiled = program.lowered.compile(compiler_options=options | dump)
        except Exception as error:  # XLA raises many types; with any, the dump may show what did not fit
            files = sorted(Path(directory).glob("*.after_optimizations.txt"))  # none if it failed earlier
            raise CompileError(files[-1].read_text(errors="replace") if files else "") from error
        # HLO texts before, between and after the partitioner's passes; '' if the program was not partitioned.
        files = sorted(Path(directory).glob("*.txt"))
        dumped = {name: [file for file in files if part.search(file.name)] for name, part in _DUMPS.items()}
        is_whole = all(dumped.values())
        dumps = {name: of[0].read_text(errors="replace") if is_whole else "" for name, of in dumped.items()}
    seconds = time.perf_counter() - start
    found = read_compiled(compiled, compiler=compiler, mesh_method=mesh_method)
    return replace(
        found,
        **dumps,
        compile_seconds=seconds,
        output_names=output_names(program),
        mistakes=program.mistakes,
        notes=(*program.notes, *found.notes),
    )


def read_compiled(compiled: jax.stages.Compiled, *, compiler: str, mesh_method: MeshMethod) -> CompiledProgram:
    """Return the HLO and the memory of a compiled function; the three modules of the partitioner are ''."""
    return CompiledProgram(
        hlo=hlo_text(compiled),
        memory_bytes=program_memory(compiled, on_tpu=compiler.startswith("libtpu")),
        messages="",
        compile_seconds=0.0,
        compiler=compiler,
        mesh_method=mesh_method,
        notes=untested_notes(compiler),
    )


def failure_of(error: Exception) -> Failure:
    """Return the failure of a user's function or of the compiler, with the memory figures if it ran out of memory."""
    hlo = error.hlo if isinstance(error, CompileError) else ""
    if isinstance(error, CompileError) and isinstance(error.__cause__, Exception):
        error = error.__cause__
    message = error_text(error)
    for pattern in _OUT_OF_MEMORY if "RESOURCE_EXHAUSTED" in message else ():
        if found := pattern.search(message):
            memory, needed, available = found.groups()
            return Failure(
                kind=FailureKind.OUT_OF_MEMORY,
                message=message,
                needed=needed,
                available=available,
                memory="" if memory == "Used" else memory,
                hlo=hlo,
            )
    return Failure(kind=FailureKind.FAILED, message=message)


def error_text(error: Exception) -> str:
    """Return an error's type, message and innermost line in the user's code, or in meshwright's if only that ran."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "site-packages" not in frame.filename]
    own = str(Path(meshwright.__file__).parent)
    frames = [frame for frame in frames if not frame.filename.startswith(own)] or frames
    place = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {error}{place}"


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
