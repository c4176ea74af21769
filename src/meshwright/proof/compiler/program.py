"""A compile request and a compiled program: plain data, passed between processes and cached on disk."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from typing import Any, NamedTuple

from meshwright.proof.compiler.targets import Effort


class MeshMethod(StrEnum):
    """How a mesh was arranged on devices."""

    MAKE_MESH = "jax.make_mesh"
    SPLIT_PHYSICAL_AXES = "mesh_utils.create_device_mesh, physical axes split"
    OVER_SLICES = "mesh_utils.create_hybrid_device_mesh"
    OWN = "the function's own mesh"


class TracedMistake(NamedTuple):
    """A mistake found in the jaxpr of a traced function.

    finding: the id of its `Finding` class. dtype, dims: those of the op's array, per shard inside a `shard_map`.
    source: the op's file:line. axes: the mesh axes that the mistake concerns. count: executions of the op per step.
    figures: further plain data, specific to the kind of mistake.
    """

    finding: str
    dtype: str
    dims: tuple[int, ...]
    source: str
    axes: tuple[str, ...] = ()
    count: int = 1
    figures: Mapping[str, Any] = {}


class LoweredProgram(NamedTuple):
    """A lowered program, with mistakes and notes from tracing.

    lowered: a `jax.stages.Lowered`, or an object with the same `compile` method. mistakes: None if no jaxpr was read.
    output_names: the pytree path of each result; None to read them from `lowered`.
    """

    lowered: Any
    mistakes: tuple[TracedMistake, ...] | None = None
    notes: tuple[str, ...] = ()
    output_names: tuple[str, ...] | None = None


class FailureKind(StrEnum):
    """Why a child process returned no program."""

    REFUSED = "refused"
    """A MeshwrightError, whose message is written for users."""
    OUT_OF_MEMORY = "out of memory"
    """The program does not fit a device."""
    FAILED = "failed"
    """The user's function or the compiler failed."""


@dataclass(frozen=True, kw_only=True)
class Failure:
    """A failed compilation, as the child process reports it.

    message: text of the error. needed, available: the program's and the device's bytes of `memory` (HBM, VMEM, ...), as
    the compiler prints them. hlo: the program that did not fit; '' if the compiler failed before it had one.
    """

    kind: FailureKind
    message: str
    needed: str = ""
    available: str = ""
    memory: str = ""
    hlo: str = ""


@dataclass(frozen=True, kw_only=True)
class CompileRequest:
    """A program to compile in a child process.

    function: `module:function`. It is called in the child as `function(mesh, **arguments)` with a `jax.sharding.Mesh`
    of explicit axes over the target's devices, and returns a `jax.stages.Lowered` or a `LoweredProgram`. arguments:
    plain data, as in JSON. mesh: every axis and its degree, outermost first (`MeshShape.layout`).
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
    """A compiled program, with its HLO, its memory and its warnings.

    hlo: the optimized, scheduled module. memory_bytes: per device, `arguments`, `outputs`, `temporaries`, `alias`
    (shared by outputs and arguments), `code`, and `peak` = arguments + outputs - alias + temporaries. On TPUs
    temporaries are the compiler's peak less the other terms. messages: warnings on the compiler's stderr.
    mistakes: found when the program was traced; None if no jaxpr was read. notes: from tracing, and on versions that no
    test has covered. mesh_method: how the mesh was arranged on the devices. cached: whether it was read from disk;
    compile_seconds is then that of the original compilation.

    annotated, propagated, partitioned: the module before, between and after the partitioner's passes; '' where nothing
    was partitioned. annotated has global shapes and the requested shardings; propagated has the sharding of every
    value; partitioned has per-device shapes and collectives, still equal for every backend. output_names: the pytree
    path of each result.
    """

    hlo: str
    memory_bytes: Mapping[str, int]
    messages: str
    compile_seconds: float
    compiler: str
    mesh_method: MeshMethod
    annotated: str = ""
    propagated: str = ""
    partitioned: str = ""
    output_names: tuple[str, ...] = ()
    mistakes: tuple[TracedMistake, ...] | None = None
    notes: tuple[str, ...] = ()
    cached: bool = False

    def to_json(self) -> dict[str, Any]:
        """This program as plain data."""
        return asdict(self) | {"memory_bytes": dict(self.memory_bytes)}


def program_from_json(data: Mapping[str, Any], *, cached: bool) -> CompiledProgram:
    """The inverse of `CompiledProgram.to_json`."""
    return replace(
        CompiledProgram(**data),
        mesh_method=MeshMethod(data["mesh_method"]),
        output_names=tuple(data.get("output_names", ())),
        mistakes=read_mistakes(data.get("mistakes")),
        notes=tuple(data.get("notes", ())),
        cached=cached,
    )


def read_mistakes(data: Iterable[Sequence[Any]] | None) -> tuple[TracedMistake, ...] | None:
    """Return mistakes that were written as JSON: the fields of each `TracedMistake` in order; None if data is None."""
    return (
        None
        if data is None
        else tuple(
            TracedMistake(finding, dtype, tuple(dims), source, tuple(axes), *rest)
            for finding, dtype, dims, source, axes, *rest in data
        )
    )
