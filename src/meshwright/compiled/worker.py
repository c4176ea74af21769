"""The process that compiles one program: `python -m meshwright.compiled.worker REQUEST RESPONSE`, two JSON files.

`compile.py` starts it with the environment of the target's compiler. The response is {"program": ...} or
{"error": message, "known": whether the message is for users as it stands}.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import jax

from meshwright.compiled.devices import lay_devices
from meshwright.compiled.program import CompiledProgram, CompileRequest
from meshwright.compiled.targets import compiler_name, compiler_options
from meshwright.compiled.text import hlo_text
from meshwright.errors import MeshwrightError
from meshwright.hardware import parse_system


def main(request_file: str, response_file: str) -> int:
    """Compile what a request asks for, write the response; the exit status, 1 after an error."""
    try:
        request = CompileRequest(**json.loads(Path(request_file).read_text()))
        response: dict[str, Any] = {"program": run(request).to_json()}
    except MeshwrightError as error:
        response = {"error": str(error), "known": True}
    except Exception as error:  # of the user's function or of the compiler: the other process tells it
        traceback.print_exc()
        response = {"error": _told(error), "known": False}
    Path(response_file).write_text(json.dumps(response))
    return int("error" in response)


def run(request: CompileRequest) -> CompiledProgram:
    """The compiled program of a request; this process must have the environment of the request's hardware."""
    system = parse_system(request.hardware)
    mesh, laid_by = lay_devices(system, request.mesh)
    lowered = _function(request.function)(mesh, **request.arguments)
    if not isinstance(lowered, jax.stages.Lowered):
        raise MeshwrightError(
            f"{request.function} returned {type(lowered).__name__}; it must return jax.jit(...).lower(...)"
        )
    start = time.perf_counter()
    compiled = lowered.compile(compiler_options=compiler_options(system, request.effort))
    return CompiledProgram(
        hlo=hlo_text(compiled),
        memory_bytes=_memory(compiled),
        messages="",  # known only once this process has ended
        compile_seconds=time.perf_counter() - start,
        compiler=compiler_name(system),
        laid_by=laid_by,
    )


def _function(name: str) -> Any:
    """The function that `module:function` names."""
    module, _, function = name.partition(":")
    try:
        return getattr(importlib.import_module(module), function)
    except ModuleNotFoundError as error:
        raise MeshwrightError(f"cannot import {error.name!r} for {name}; it must be importable where you are") from None
    except AttributeError:
        raise MeshwrightError(
            f"module {module} has no {function or 'function'!r}; name it as module:function"
        ) from None


def _memory(compiled: jax.stages.Compiled) -> dict[str, int]:
    """The memory of a program, per device; the peak as `CompiledProgram` defines it."""
    stats: Any = compiled.memory_analysis()
    names = {"arguments": "argument", "outputs": "output", "temporaries": "temp", "alias": "alias"}
    terms = {ours: int(getattr(stats, f"{theirs}_size_in_bytes")) for ours, theirs in names.items()}
    allocated = terms["arguments"] + terms["outputs"] - terms["alias"] + terms["temporaries"]
    # The TPU compiler's temporaries can exceed its peak (they include fragmentation), or be 0 beside a larger peak.
    peak = max(int(stats.peak_memory_in_bytes), allocated)
    return terms | {"code": int(stats.generated_code_size_in_bytes), "peak": peak}


def _told(error: Exception) -> str:
    """An error with its type, and the place in the user's code that it comes from."""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if "site-packages" not in frame.filename and frame.filename != __file__
    ]
    place = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {error}{place}"


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
