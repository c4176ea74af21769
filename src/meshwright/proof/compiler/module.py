"""Pass a lowered program to another process for compilation: its StableHLO module and its shardings.

`jax.export` is not used: it would drop donation, layouts and memory kinds of the arguments, and rename the parts of a
step.
"""

from __future__ import annotations

import base64
import gzip
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.interpreters import mlir, pxla
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from meshwright.errors import MeshwrightError
from meshwright.proof.compiler.program import LoweredProgram, read_mistakes

LOAD_MODULE = "meshwright.proof.compiler.module:load_module"


def pack_module(program: LoweredProgram) -> dict[str, Any]:
    """Return a lowered program as plain data: the keyword arguments of `load_module`, by name.

    The shardings of arguments are read from private attributes: JAX has no public one (0.10.2, 0.11.2 and 0.12.0.1).

    Raises:
        MeshwrightError: the installed JAX does not keep what another process needs to compile the program.
    """
    lowering = getattr(program.lowered, "_lowering", None)
    known = getattr(lowering, "compile_args", {})
    if missing := [name for name in ("ordered_effects", "in_shardings", "out_shardings") if name not in known]:
        raise MeshwrightError(
            f"JAX {jax.__version__} keeps no {missing[0]} with a lowered program, which another process needs to"
            f" compile it; inspect it without on=, or take JAX 0.10 to 0.12"
        )
    assert lowering is not None
    tokens = [False] * len(known["ordered_effects"])
    bytecode = mlir.module_to_bytecode(lowering.stablehlo())
    return {
        "module": base64.b64encode(gzip.compress(bytecode, mtime=0)).decode(),
        "free_inputs": tokens + [not isinstance(one, Sharding) for one in known["in_shardings"]],
        "free_outputs": tokens + [_is_free(one) for one in known["out_shardings"]],
        "output_names": list(output_names(program)),
        "mistakes": None if program.mistakes is None else [list(one) for one in program.mistakes],
        "notes": list(program.notes),
    }


def load_module(
    mesh: Mesh,
    *,
    module: str,
    free_inputs: Sequence[bool],
    free_outputs: Sequence[bool],
    output_names: Sequence[str],
    mistakes: Sequence[Sequence[Any]] | None,
    notes: Sequence[str],
) -> LoweredProgram:
    """Return the program that `pack_module` packed; it will be compiled for the devices of `mesh`, in their order.

    module: the StableHLO bytecode, gzipped, in base64. free_inputs, free_outputs: whether the partitioner may choose
    the sharding of each input and of each output. The other arguments are fields of `LoweredProgram`.
    """
    bytecode = gzip.decompress(base64.b64decode(module))
    lowered = _Module(bytecode, mesh, tuple(free_inputs), tuple(free_outputs))
    return LoweredProgram(lowered, read_mistakes(mistakes), tuple(notes), tuple(output_names))


def output_names(program: LoweredProgram) -> tuple[str, ...]:
    """Return the pytree path of each result."""
    if program.output_names is not None:
        return program.output_names
    paths, _ = jax.tree_util.tree_flatten_with_path(program.lowered.out_info)
    return tuple(jax.tree_util.keystr(path) for path, _ in paths)


def _is_free(sharding: Any) -> bool:
    """Whether the partitioner may choose a result's sharding, wholly or in part."""
    if not isinstance(sharding, Sharding):  # but JAX's marker for an unspecified sharding
        return True
    return PartitionSpec.UNCONSTRAINED in getattr(sharding, "spec", ())


class _Module:
    """A StableHLO module with the `compile` method of a `jax.stages.Lowered`."""

    def __init__(self, bytecode: bytes, mesh: Mesh, free_inputs: Sequence[bool], free_outputs: Sequence[bool]) -> None:
        self.bytecode, self.mesh, self.free_inputs, self.free_outputs = bytecode, mesh, free_inputs, free_outputs

    def compile(self, *, compiler_options: Mapping[str, Any]) -> _Executable:
        """Compile the module for the devices of its mesh, in their order."""
        client = self.mesh.devices.flat[0].client
        is_here = type(client).__name__ != "CompileOnlyPyClient"
        compile_ = client.compile_and_load if is_here else client.compile
        with mlir.make_ir_context():
            module = mlir.ir.Module.parse(self.bytecode)
            options = pxla.create_compile_options(
                module,
                False,
                self.free_inputs,
                self.free_outputs,
                client,
                self.mesh.devices.flatten(),
                dict(compiler_options),
            )
            devices = NamedSharding(self.mesh, PartitionSpec())._internal_device_list
            return _Executable(compile_(module, executable_devices=devices, compile_options=options))


class _Executable:
    """A compiled program, with the methods of a `jax.stages.Compiled` that are used here."""

    def __init__(self, executable: Any) -> None:
        self.executable = executable

    def as_text(self) -> str:
        """The optimized HLO."""
        return "\n\n".join(module.to_string() for module in self.executable.hlo_modules())

    def memory_analysis(self) -> Any:
        """The compiler's memory statistics."""
        return self.executable.get_compiled_memory_stats()

    def runtime_executable(self) -> Any:
        """The wrapped executable."""
        return self.executable
