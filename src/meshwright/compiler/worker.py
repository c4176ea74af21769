"""The process that compiles one program: `python -m meshwright.compiler.worker REQUEST RESPONSE`, two JSON files.

`compile.py` starts it with the environment of the target's compiler. The response is {"program": ...} or
{"error": message, "known": whether the message is for users as it stands}.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

import jax

from meshwright.compiler.devices import lay_devices
from meshwright.compiler.dumps import dump_options, read_dumps
from meshwright.compiler.named import load_function
from meshwright.compiler.program import CompiledProgram, CompileRequest
from meshwright.compiler.targets import compiler_name, compiler_options
from meshwright.errors import MeshwrightError
from meshwright.hardware import parse_system
from meshwright.hlo.text import hlo_text


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
    lowered = load_function(request.function)(mesh, **request.arguments)
    if not isinstance(lowered, jax.stages.Lowered):
        raise MeshwrightError(
            f"{request.function} returned {type(lowered).__name__}; it must return jax.jit(...).lower(...)"
        )
    options = compiler_options(system, request.effort)
    return compile_lowered(lowered, options=options, compiler=compiler_name(system), laid_by=laid_by)


def compile_lowered(
    lowered: jax.stages.Lowered, *, options: dict[str, Any], compiler: str, laid_by: str
) -> CompiledProgram:
    """The program of a lowered function, compiled in this process with some of XLA's options; without messages.

    What the compiler writes goes to this process's stderr.
    """
    start = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="meshwright-") as directory:
        compiled = lowered.compile(compiler_options=options | dump_options(directory))
        dumps = read_dumps(directory)
    return CompiledProgram(
        hlo=hlo_text(compiled),
        memory_bytes=_memory(compiled, on_tpu=compiler.startswith("libtpu")),
        messages="",
        compile_seconds=time.perf_counter() - start,
        compiler=compiler,
        laid_by=laid_by,
        annotated=dumps["annotated"],
        propagated=dumps["propagated"],
        partitioned=dumps["partitioned"],
        output_names=_paths(lowered.out_info),
    )


def _paths(tree: Any) -> tuple[str, ...]:
    """The path of each leaf of a tree."""
    return tuple(jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_flatten_with_path(tree)[0])


def _memory(compiled: jax.stages.Compiled, *, on_tpu: bool) -> dict[str, int]:
    """The memory of a program, per device; the peak as `CompiledProgram` defines it."""
    stats: Any = compiled.memory_analysis()
    names = {"arguments": "argument", "outputs": "output", "temporaries": "temp", "alias": "alias"}
    terms = {ours: int(getattr(stats, f"{theirs}_size_in_bytes")) for ours, theirs in names.items()}
    held = terms["arguments"] + terms["outputs"] - terms["alias"]
    peak = int(stats.peak_memory_in_bytes)
    if on_tpu:
        # Its figure for temporaries is no allocation: libtpu takes steps for which the terms exceed the memory (3.86 +
        # 13.94 GiB of 15.75 on v5e, with a peak of 15.11), and refuses by its peak.
        terms["temporaries"] = max(0, peak - held)
    else:
        peak = max(peak, held + terms["temporaries"])
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
