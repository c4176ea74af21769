"""Compile and inspect any JAX function, for the devices of this process or for a target that is not present."""

from __future__ import annotations

import gzip
import math
import os
import re
import tempfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding

from meshwright.compiler import CompiledProgram, CompileRequest, Effort, MeshMethod, compile_in_child
from meshwright.compiler.load import load_function
from meshwright.compiler.worker import compile_lowered
from meshwright.errors import MeshwrightError
from meshwright.hardware import System, chip_names, parse_system
from meshwright.inspection.context import Rules
from meshwright.inspection.inspection import Inspection, read_inspection
from meshwright.inspection.lower import (
    LOWER_NAMED,
    LOWER_PICKLED,
    abstract,
    function_name,
    lower,
    meshes_in,
    pack,
    source_hash,
    trace,
    unused_constraints,
)
from meshwright.mesh import MeshShape, parse_axes
from meshwright.planner import read_system
from meshwright.record import Collective
from meshwright.step.choices import not_a_choice

_PARTITIONS = re.compile(r"\A[^\n]* num_partitions=(\d+)")

MeshLike = Mesh | AbstractMesh | Mapping[str, int]


def inspect(
    function: Any,
    *args: Any,
    mesh: str | MeshShape | MeshLike | None = None,
    on: str | System | None = None,
    types: Literal["explicit", "auto"] = "explicit",
    effort: Effort = "default",
    rules: Rules | None = None,
    expected: Sequence[Collective] | None = None,
) -> Inspection:
    """Compile a function on some arguments, and say what the program does and what is wrong with it. Nothing is run.

    Args:
        function: any JAX function, jitted or not; or, as the command takes them, `module:function` of one that takes a
            mesh, or the path of an HLO dump.
        args: arrays or `jax.ShapeDtypeStruct`s, whose shardings count.
        mesh: the mesh it is for, or its axes and degrees, outermost first, as `dp=2,fsdp=4`; by default that of the
            arguments or of `jax.set_mesh`.
        on: the hardware to compile for, as `v5p:4x4x4`, which need not be here; a child process compiles, and every
            mesh in the function and its arguments stands for the one of the target. By default the devices here.
        types: of the mesh's axes, for `module:function`.
        effort: `fast` compiles for a TPU in a fraction of the time, but not the schedule that will run.
        rules, expected: see `ProgramContext`.

    Raises:
        MeshwrightError: where the compiler is not installed, the function cannot go to the other process, or does not
            compile.
    """
    if on is not None:
        on = str(read_system(on))
    if isinstance(mesh, (str, MeshShape)):
        mesh = parse_axes(mesh) if isinstance(mesh, str) else mesh.layout
    if types not in ("explicit", "auto"):
        raise MeshwrightError(not_a_choice("types", types, ("explicit", "auto")))
    if isinstance(function, (str, Path)):
        return _inspect_by_name(str(function), args, mesh, on, types, effort, {"rules": rules, "expected": expected})
    if not callable(function):
        raise MeshwrightError(
            f"{function!r} is no function; inspect takes a JAX function and its arguments, 'module:function', or the"
            f" path of an HLO dump"
        )
    found = mesh if mesh is not None else next(meshes_in(args), _current_mesh())
    given = {"rules": rules, "expected": expected}
    if on is None:
        return _inspect_in_process(function, args, _concrete(found), given)
    degrees = _degrees(found) if found is not None else {"dp": 1}
    request = CompileRequest(
        function=LOWER_PICKLED,
        hardware=on,
        mesh=degrees,
        arguments={
            "payload": pack(function, args),
            "types": _axis_types(found, args, degrees),
            "sources": source_hash(),
        },
        effort=effort,
    )
    return _inspect_in_child(function_name(function), request, given)


def _inspect_by_name(
    name: str,
    args: Sequence[Any],
    mesh: MeshLike | None,
    on: str | None,
    types: str,
    effort: Effort,
    given: Mapping[str, Any],
) -> Inspection:
    """The inspection of `module:function` or of an HLO dump."""
    if mesh is None or args:
        wrong = "takes no arguments beside it" if args else "needs a mesh, as mesh='dp=2,fsdp=4'"
        raise MeshwrightError(f"{name!r} {wrong}")
    degrees, file = _degrees(mesh), Path(name)
    if file.is_file():
        return inspect_text(read_dump(file), mesh=degrees, on=on, name=file.name, **given)
    if ":" not in name:
        raise MeshwrightError(f"{name!r} is neither a file nor module:function")
    target = on or f"cpu:{math.prod(degrees.values())}"
    axis_type = AxisType.Auto if types == "auto" else AxisType.Explicit
    return inspect_named(name, mesh=degrees, on=target, types=axis_type, effort=effort)


def read_dump(file: Path) -> str:
    """The HLO text of a file, packed with gzip or not."""
    try:
        data = file.read_bytes()
        return (gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data).decode()
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise MeshwrightError(f"cannot read {file} as HLO text: {error}") from None


def inspect_named(
    name: str, *, mesh: Mapping[str, int], on: str, types: AxisType = AxisType.Explicit, effort: Effort = "default"
) -> Inspection:
    """Inspect what `module:function` makes for a mesh, compiled in a child process.

    The function takes a mesh and returns what `jax.jit(…).lower(…)` does, or (function, arguments).
    """
    load_function(name)  # so that what it imports is known, and a mistake in its name is told at once
    request = CompileRequest(
        function=LOWER_NAMED,
        hardware=on,
        mesh=mesh,
        arguments={"function": name, "types": [types.name] * len(mesh), "sources": source_hash()},
        effort=effort,
    )
    return _inspect_in_child(name, request, {})


def inspect_text(
    text: str,
    *,
    mesh: Mapping[str, int],
    on: str | None = None,
    name: str = "",
    rules: Rules | None = None,
    expected: Sequence[Collective] | None = None,
) -> Inspection:
    """Inspect a compiled program from HLO text alone, as printed by `compiled.as_text()` or dumped by XLA.

    mesh: every axis and its degree in device order, outermost first. on: its hardware, for times. Memory and the
    partitioner's decisions are not in the text.
    """
    system = parse_system(on) if on else None
    is_scheduled = "is_scheduled=true" in text[:4096] and system is not None and system.chip.kind != "cpu"
    return read_inspection(
        name, text, mesh, hardware=on or "", system=system, is_scheduled=is_scheduled, rules=rules, expected=expected
    )


def _inspect_in_process(function: Any, args: Sequence[Any], mesh: Mesh | None, given: Mapping[str, Any]) -> Inspection:
    args = abstract(tuple(args)) if mesh is None else _with_mesh(abstract(tuple(args)), mesh)
    with _capture_stderr() as said:
        traced = trace(function, args, mesh)
        program = compile_lowered(
            lower(traced, mesh), options={}, compiler=f"jaxlib {version('jaxlib')}", mesh_method=MeshMethod.OWN
        )
    if mesh is None and (count := _PARTITIONS.search(program.hlo)):
        raise MeshwrightError(
            f"{function_name(function)} runs on {count[1]} devices, and nothing says as which mesh;"
            f" give it as mesh={{'dp': {count[1]}}}"
        )
    devices = list(mesh.devices.flat) if mesh is not None else jax.devices()[:1]
    system = _system(devices)
    return read_inspection(
        function_name(function),
        program.hlo,
        _degrees(mesh) if mesh is not None else {"dp": 1},
        hardware=str(system) if system else devices[0].device_kind,
        system=system,
        program=replace(program, messages=said(), unused_constraints=unused_constraints(traced)),
        is_scheduled=system is not None and system.chip.kind != "cpu",
        **given,
    )


def _current_mesh() -> Mesh | None:
    """The mesh of `jax.set_mesh`, or None."""
    mesh = jax.sharding.get_mesh()
    return None if mesh.empty else mesh


def _inspect_in_child(name: str, request: CompileRequest, given: Mapping[str, Any]) -> Inspection:
    system = parse_system(request.hardware)
    try:
        program: CompiledProgram = compile_in_child(request)
    except MeshwrightError as error:
        raise MeshwrightError(str(error).replace(request.function, name)) from None
    return read_inspection(
        name,
        program.hlo,
        request.mesh,
        hardware=str(system),
        system=system,
        program=program,
        is_scheduled=system.chip.kind == "gpu" or (system.chip.kind == "tpu" and request.effort == "default"),
        **given,
    )


def _concrete(mesh: MeshLike | None) -> Mesh | None:
    """A mesh over devices of this process."""
    if mesh is None or isinstance(mesh, Mesh):
        return mesh
    degrees = _degrees(mesh)
    types = mesh.axis_types if isinstance(mesh, AbstractMesh) else (AxisType.Explicit,) * len(degrees)
    count, there = math.prod(degrees.values()), jax.device_count()
    if count > there:
        raise MeshwrightError(f"the mesh has {count} devices and {there} are here; on='cpu:{count}' simulates as many")
    return jax.make_mesh(tuple(degrees.values()), tuple(degrees), axis_types=types, devices=jax.devices()[:count])


def _degrees(mesh: MeshLike) -> dict[str, int]:
    """The axes of a mesh and their degrees, outermost first."""
    return dict(mesh.shape) if isinstance(mesh, (Mesh, AbstractMesh)) else dict(mesh)


def _axis_types(mesh: MeshLike | None, args: Any, degrees: Mapping[str, int]) -> list[str]:
    """The type of each axis: of the mesh, else of the arguments' meshes, else explicit, as in `jax.make_mesh`."""
    for one in (mesh, *meshes_in(args)):
        if isinstance(one, (Mesh, AbstractMesh)) and set(degrees) <= set(one.axis_names):
            by_name = dict(zip(one.axis_names, one.axis_types, strict=True))
            return [by_name[axis].name for axis in degrees]
    return [AxisType.Explicit.name] * len(degrees)


def _with_mesh(args: Any, mesh: Mesh) -> Any:
    """The arguments with their specs on the devices of a mesh, where their own mesh is abstract."""

    def rebase(leaf: Any) -> Any:
        sharding = getattr(leaf, "sharding", None)
        if not isinstance(sharding, NamedSharding) or isinstance(sharding.mesh, Mesh):
            return leaf
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, sharding.spec))

    return jax.tree.map(rebase, args)


def _system(devices: Sequence[Any]) -> System | None:
    """The system of some devices: simulated CPU devices, or GPUs of a known name; None for others."""
    kind = devices[0].device_kind.lower()
    chip = "cpu" if devices[0].platform == "cpu" else next((name for name in chip_names() if name in kind), None)
    return parse_system(f"{chip}:{len(devices)}") if chip and devices[0].platform in ("cpu", "gpu") else None


@contextmanager
def _capture_stderr() -> Iterator[Any]:
    """Capture what C++ code writes to stderr: yields a function that returns the text afterwards."""
    with tempfile.TemporaryFile() as file:
        saved, text = os.dup(2), ""
        os.dup2(file.fileno(), 2)
        try:
            yield lambda: text
        finally:
            os.dup2(saved, 2)
            os.close(saved)
            file.seek(0)
            text = file.read().decode(errors="replace")
