"""A program to compile, and what is kept of it once it is: values that go between processes and onto the disk."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from meshwright.compiler.targets import Effort


@dataclass(frozen=True, kw_only=True)
class CompileRequest:
    """A program to compile in a process of its own.

    function: `module:function`. It is called there as `function(mesh, **arguments)`, the mesh a `jax.sharding.Mesh` of
    explicit axes over the hardware's devices, and returns a `jax.stages.Lowered`. arguments: plain data, as JSON has.
    mesh: every axis and its degree, outermost first (`MeshShape.layout`).
    """

    function: str
    hardware: str
    mesh: Mapping[str, int]
    arguments: Mapping[str, Any]
    effort: Effort = "default"

    def to_json(self) -> dict[str, Any]:
        """This request as plain data."""
        return asdict(self) | {"mesh": dict(self.mesh), "arguments": dict(self.arguments)}


@dataclass(frozen=True, kw_only=True)
class CompiledProgram:
    """What a compiler made of a program.

    hlo: the optimized, scheduled module. memory_bytes: per device, `arguments`, `outputs`, `temporaries`, `alias` (what
    outputs share with arguments), `code` and `peak`, arguments + outputs - alias + temporaries. On TPUs temporaries are
    what the compiler's peak leaves for them. messages: the warnings it wrote. laid_by: how the mesh was laid over the
    devices. cached: read from disk; compile_seconds is then the time it took then.
    annotated, propagated, partitioned: the module as the partitioner's passes found and left it: with global shapes and
    the shardings that the program asks for; with those of every value; with a device's shapes and one collective for
    each move, as yet the same for every backend. All three are '' where there was nothing to partition. output_names:
    the path of each result.
    """

    hlo: str
    memory_bytes: Mapping[str, int]
    messages: str
    compile_seconds: float
    compiler: str
    laid_by: str
    annotated: str = ""
    propagated: str = ""
    partitioned: str = ""
    output_names: tuple[str, ...] = ()
    cached: bool = False

    def to_json(self) -> dict[str, Any]:
        """This program as plain data."""
        return asdict(self) | {"memory_bytes": dict(self.memory_bytes)}


def program_from_json(data: Mapping[str, Any], *, cached: bool) -> CompiledProgram:
    """The program that `CompiledProgram.to_json` wrote."""
    return replace(CompiledProgram(**data), output_names=tuple(data.get("output_names", ())), cached=cached)
