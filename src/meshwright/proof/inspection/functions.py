"""Compile and inspect any JAX function, for the devices of this process or for a target that is not present."""

from __future__ import annotations

import math
import os
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import jax
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, Mesh, NamedSharding
from jax.stages import Compiled, Lowered, Traced

from meshwright.description.hardware.load import chip_names
from meshwright.description.hardware.system import System, parse_system
from meshwright.errors import DoesNotFitError, MeshwrightError
from meshwright.mesh import MeshShape, parse_axes
from meshwright.options.values import read_system
from meshwright.planning.files import is_run_directory
from meshwright.planning.plan import Plan, as_run, is_plan_file
from meshwright.proof.compiler.compile import compile_in_child
from meshwright.proof.compiler.load import load_function
from meshwright.proof.compiler.module import LOAD_MODULE, pack_module
from meshwright.proof.compiler.process import compile_error
from meshwright.proof.compiler.program import CompiledProgram, CompileRequest, LoweredProgram, MeshMethod
from meshwright.proof.compiler.targets import Effort, compiler_name, device_kind, platform_of
from meshwright.proof.compiler.worker import CompileError, compile_lowered, failure_of, read_compiled
from meshwright.proof.inspection.baseline import read_accepted
from meshwright.proof.inspection.context import Rules
from meshwright.proof.inspection.dumps import dump_with_shardings, inspect_text
from meshwright.proof.inspection.inspection import Inspection, read_inspection
from meshwright.proof.inspection.lower import LOWER_NAMED, first_that_lowers, lower_call, source_hash, stage_of
from meshwright.proof.inspection.meshes import (
    NOT_COPIED,
    Call,
    MeshLike,
    current_mesh,
    degrees_of,
    for_target,
    function_name,
    held_meshes,
    meshes_in,
    on_mesh,
    only_mesh,
    set_mesh,
)
from meshwright.proof.inspection.run_script import run_script
from meshwright.proof.inspection.script import read_script
from meshwright.proof.verification.library import plan_and_measured
from meshwright.proof.verification.plans import step_request
from meshwright.record import Collective
from meshwright.support.field_types import not_a_choice
from meshwright.units import show_mesh

_SDY_MESH = re.compile(r"sdy\.mesh @\S+ = <\[([^\]]+)\]>")
_SDY_AXIS = re.compile(r'"([^"]+)"=(\d+)')
_PARTITIONS = re.compile(r"\A[^\n]* num_partitions=(\d+)")

AxisKind = Literal["explicit", "auto"]


def inspect(
    function: Any,
    *args: Any,
    mesh: str | MeshShape | MeshLike | None = None,
    on: str | System | None = None,
    types: AxisKind | None = None,
    effort: Effort = "default",
    rules: Rules | None = None,
    expected: Sequence[Collective] | None = None,
    state: str | Sequence[str] | None = None,
    ignore: str | Sequence[str] = (),
    baseline: str | Path | None = None,
    **kwargs: Any,
) -> Inspection:
    """Compile a function for some arguments; report what the program does and its mistakes. Nothing is executed.

    The program is the one that a call would run: traced in the caller's `jax.set_mesh` or `with mesh:`, with the
    donation, weak types, layouts and memory kinds of the arguments.

    Args:
        function: any JAX function, jitted or not; an object with `.lower`, as from `nnx.jit`, `eqx.filter_jit` and
            `jax.pmap`; the result of `.trace`, `.lower` or `.compile`; `module:function` or `file.py:function`, which
            takes a mesh, as for `meshwright inspect`; the path of a script, with `:name` for one of its jitted
            functions; the path of an HLO dump; or a plan, its file or a run, whose train step is inspected as
            `meshwright.verify` compiles it.
        args, kwargs: arrays or `jax.ShapeDtypeStruct`s with shardings, and other arguments of the call.
        mesh: the mesh, or its axes and degrees, outermost first, as `dp=2,fsdp=4`; by default that of the arguments, or
            the one in use. A given mesh is in use while the function is traced.
        on: hardware to compile for, as `v5p:4x4x4`, which need not be present; by default this machine's devices. The
            function is lowered here and compiled in a child process; the target's mesh replaces every mesh in the
            function and its arguments.
        types: axis types where only degrees are given; by default explicit, or auto if that does not lower.
        effort: `fast` compiles for a TPU in a fraction of the time, without the schedule that will run; bytes differ
            too where the default effort moves or fuses more.
        state: names of the arguments whose new values a step returns, so that they could be donated; by default those
            that the program computes updates of. Gradients are not state.
        rules: regular expressions over argument paths, each with the intended mesh axes of every dim.
        expected: the intended collectives; by default unknown.
        ignore: ids of findings that do not count, each with the files, if not all: `padded-arrays:models/*.py`.
        baseline: a file by `Inspection.write_baseline`, whose findings do not count.

    Raises:
        MeshwrightError: the compiler is not installed, or the function does not lower or compile; its error is the
            cause.
    """
    check_options = {
        "rules": rules,
        "expected": expected,
        "state": (state,) if isinstance(state, str) else state,
        "accepted": read_accepted(ignore, baseline),
    }
    if isinstance(function, (str, Path)) and (is_run_directory(function) or is_plan_file(function)):
        function, _ = plan_and_measured(function, None, {})
    if isinstance(function, Plan):
        said = {"arguments": args or kwargs, "mesh": mesh, "on": on, "types": types}
        for name in (name for name, value in said.items() if value):
            raise MeshwrightError(f"a plan sets its {name} itself; leave {name} out")
        step = f"train step of {function.workload.model.name}"
        return _inspect_in_child(step, step_request(as_run(function), effort=effort), check_options)
    if on is not None:
        on = str(read_system(on))
    if isinstance(mesh, (str, MeshShape)):
        mesh = parse_axes(mesh) if isinstance(mesh, str) else mesh.layout
    if types not in ("explicit", "auto", None):
        raise MeshwrightError(not_a_choice("types", types, ("explicit", "auto")))
    if isinstance(function, (str, Path)):
        return _inspect_by_name(str(function), bool(args or kwargs), mesh, on, types, effort, check_options)
    call, held = Call(function, args, kwargs), stage_of(function)
    if isinstance(held, Compiled):
        return _inspect_compiled(call, held, mesh, on, check_options)
    if not callable(function) and not isinstance(held, (Lowered, Traced)):
        raise MeshwrightError(
            f"{function!r} is not a function; inspect takes a JAX function and its arguments, 'module:function', or the"
            f" path of a script or of an HLO dump"
        )
    return _lower(call, mesh, on, types, effort, check_options)()


def _inspect_by_name(
    name: str,
    has_arguments: bool,
    mesh: MeshLike | None,
    on: str | None,
    types: AxisKind | None,
    effort: Effort,
    check_options: Mapping[str, Any],
) -> Inspection:
    """Inspect `module:function`, a script or an HLO dump. has_arguments: whether `inspect` has arguments beside it.

    check_options, here and below: the arguments `rules`, `expected`, `state` and `accepted` of `read_inspection`.
    """
    script = None if has_arguments else read_script(name)
    if script is not None and not script.takes_mesh(has_mesh=mesh is not None):
        # The call is lowered where the script makes it, and compiled when the script has ended.
        if mesh is not None and on is None:
            on = f"cpu:{math.prod(degrees_of(mesh).values())}"  # the script's own devices may be others
        taken = run_script(script, lambda call: _lower(call, mesh, on, types, effort, check_options))
        found = taken.result()
        return replace(
            found,
            name=f"{script.file}:{taken.name}",
            record=replace(found.record, notes=(taken.note, *found.record.notes)),
        )
    if mesh is None or has_arguments:
        wrong = "takes no arguments beside it" if has_arguments else "needs a mesh, as mesh='dp=2,fsdp=4'"
        raise MeshwrightError(f"{name!r} {wrong}")
    degrees, file = degrees_of(mesh), Path(name)
    if file.is_file() and script is None:
        if types is not None or effort != "default":
            raise MeshwrightError(f"{name} is already compiled; types (--axes) and effort would have no effect")
        return inspect_text(dump_with_shardings(file), mesh=degrees, on=on, name=file.name, **check_options)
    if ":" not in name:
        raise MeshwrightError(f"{name!r} is neither a file nor module:function")
    # Imported here too, so that its imports are known, and a mistake in its name is reported at once.
    if not callable(made := load_function(name)):
        raise MeshwrightError(f"{name} is a {type(made).__name__}, not a function that takes a mesh")
    request = CompileRequest(
        function=LOWER_NAMED,
        hardware=on or f"cpu:{math.prod(degrees.values())}",
        mesh=degrees,
        arguments={"function": name, "types": [kind.name for kind in _kinds(types)], "sources": source_hash()},
        effort=effort,
    )
    return _inspect_in_child(name, request, check_options)


def _lower(
    call: Call,
    mesh: MeshLike | None,
    on: str | None,
    types: AxisKind | None,
    effort: Effort,
    check_options: Mapping[str, Any],
) -> Callable[[], Inspection]:
    """Lower a call, and return a function that compiles and inspects the program. Arguments as in `inspect`.

    on: None for the devices of this process.
    """
    if on is None:
        return _lower_here(call, mesh, types, check_options)
    return _lower_for_target(call, mesh, parse_system(on), types, effort, check_options)


def _lower_here(
    call: Call, mesh: MeshLike | None, types: AxisKind | None, check_options: Mapping[str, Any]
) -> Callable[[], Inspection]:
    name = function_name(call.function)
    with _capture_stderr() as lowering:
        lowered = first_that_lowers(name, _ways_here(call, mesh, types))
    found = _mesh_of(call, mesh) or _mesh_of_module(lowered)

    def compiled() -> Inspection:
        compiler = f"jaxlib {version('jaxlib')}"
        with _capture_stderr() as compiling:
            try:
                program = compile_lowered(lowered, options={}, compiler=compiler, mesh_method=MeshMethod.OWN)
            except CompileError as error:
                raise compile_error(name, failure_of(error)) from error.__cause__
        count = _PARTITIONS.search(program.hlo)
        held = _mesh_held(call, int(count[1])) if not found and count and int(count[1]) > 1 else None
        return _read_here(name, replace(program, messages=lowering() + compiling()), found or held, check_options)

    return compiled


def _ways_here(
    call: Call, mesh: MeshLike | None, types: AxisKind | None, platform: str | None = None
) -> list[tuple[str, Callable[[], LoweredProgram]]]:
    """Return attempts at lowering a call for this machine's devices, in order, each a description and a function.

    platform: the platform to lower for; by default that of the devices.
    """

    def way(words: str, used: Mesh | None) -> tuple[str, Callable[[], LoweredProgram]]:
        def lower() -> LoweredProgram:
            with set_mesh(used):
                return lower_call(call if used is None else on_mesh(call, used), platform)

        return words, lower

    found = _mesh_of(call, mesh)
    if mesh is None and isinstance(found, Mesh):
        own = way("as it is called", None)
        return [own] if found == current_mesh() else [own, way("under jax.set_mesh of its arguments' mesh", found)]
    if found is None or isinstance(found, Mesh):
        return [way("as it is called", found)]
    return [way(words, _on_devices_here(found, kinds)) for words, kinds in _axis_types(call, found, types)]


def _axis_types(call: Call, mesh: MeshLike, types: AxisKind | None) -> list[tuple[str, tuple[AxisType, ...]]]:
    """Return (description, type of each axis of `mesh`) for each attempt at lowering.

    If `mesh`, or an argument's mesh with its axes, has axis types, there is one attempt, with these types; else one for
    each of `_kinds`.
    """
    degrees = degrees_of(mesh)
    for one in (mesh, *meshes_in(call)):
        if isinstance(one, (Mesh, AbstractMesh)) and set(degrees) <= set(one.axis_names):
            by_name = dict(zip(one.axis_names, one.axis_types, strict=True))
            return [("with its axes as they are", tuple(by_name[axis] for axis in degrees))]
    return [(f"with {kind.name.lower()} axes", (kind,) * len(degrees)) for kind in _kinds(types)]


def _kinds(types: AxisKind | None) -> tuple[AxisType, ...]:
    """Return axis types to try: the requested one, else explicit as in `jax.make_mesh`, then auto for older code."""
    named = {"explicit": AxisType.Explicit, "auto": AxisType.Auto}
    return tuple(named.values()) if types is None else (named[types],)


def _inspect_compiled(
    call: Call, compiled: Compiled, mesh: MeshLike | None, on: str | None, check_options: Mapping[str, Any]
) -> Inspection:
    """Inspect a compiled program. on: its hardware, needed for times."""
    if call.args or call.kwargs:
        raise MeshwrightError("a Compiled has its arguments already; give none beside it")
    shardings = jax.tree.leaves((compiled.input_shardings, compiled.output_shardings))
    found = mesh if mesh is not None else next((s.mesh for s in shardings if isinstance(s, NamedSharding)), None)
    system = parse_system(on) if on else None
    compiler = compiler_name(system) if system else f"jaxlib {version('jaxlib')}"
    program = read_compiled(compiled, compiler=compiler, mesh_method=MeshMethod.OWN)
    return _read_here("a compiled program", program, found, check_options, system)


def _read_here(
    name: str,
    program: CompiledProgram,
    mesh: MeshLike | None,
    check_options: Mapping[str, Any],
    system: System | None = None,
) -> Inspection:
    """Return the inspection of a program that was compiled in this process."""
    if mesh is None and (count := _PARTITIONS.search(program.hlo)):
        raise MeshwrightError(
            f"{name} runs on {count[1]} devices, and nothing says as which mesh; give it as mesh={{'dp': {count[1]}}}"
        )
    devices = list(mesh.devices.flat) if isinstance(mesh, Mesh) else jax.devices()
    degrees = degrees_of(mesh) if mesh is not None else {"dp": 1}
    system = system or _system(devices, math.prod(degrees.values()))
    return read_inspection(
        name,
        program.hlo,
        degrees,
        hardware=str(system) if system else devices[0].device_kind,
        system=system,
        program=program,
        is_scheduled=system is not None and system.chip.kind != "cpu",
        **check_options,
    )


def _lower_for_target(
    call: Call,
    mesh: MeshLike | None,
    system: System,
    types: AxisKind | None,
    effort: Effort,
    check_options: Mapping[str, Any],
) -> Callable[[], Inspection]:
    if isinstance(stage_of(call.function), Lowered):
        lowered = lower_call(call)
        platform, platforms = platform_of(system), lowered.lowered._lowering._platforms
        if platform not in platforms:
            raise MeshwrightError(
                f"it is lowered for {', '.join(platforms)} and {system} needs {platform}; give the function, or lower"
                f" it by .trace(…).lower(lowering_platforms=({platform!r},))"
            )
        found = mesh or _mesh_of_module(lowered) or {"dp": 1}
    else:
        chips = system.num_devices
        found = _mesh_of(call, mesh) or (_mesh_held(call, chips) if chips > 1 else None) or {"dp": 1}
        if (count := math.prod(degrees_of(found).values())) != chips:
            shown = show_mesh(degrees_of(found))
            raise MeshwrightError(
                f"mesh {shown} has {count} devices; {system} has {chips}; mesh= (--mesh) gives the target's degrees"
            )
        lowered = first_that_lowers(function_name(call.function), _ways_there(call, mesh, found, system, types))
    request = CompileRequest(
        function=LOAD_MODULE,
        hardware=str(system),
        mesh=degrees_of(found),
        arguments=pack_module(lowered),
        effort=effort,
    )
    return partial(_inspect_in_child, function_name(call.function), request, check_options)


def _ways_there(
    call: Call, mesh: MeshLike | None, found: MeshLike, system: System, types: AxisKind | None
) -> list[tuple[str, Callable[[], LoweredProgram]]]:
    """Return ways of lowering a call for absent devices, as (words for messages, function that lowers), in their order.

    The first ones lower it as the caller does, the others with a mesh of absent devices in use. mesh: as given to
    `inspect`. found: the axes and degrees of the target's mesh.
    """
    kind, cores = device_kind(system)
    platform, degrees = platform_of(system), degrees_of(found)
    device = AbstractDevice(device_kind=kind, num_cores=cores, platform=platform)
    if not hasattr(call.function, "trace") and hasattr(call.function, "lower"):
        # Equinox lowers arrays alone, nothing abstract: they stay where they are.
        return _ways_here(call, mesh, types, platform)
    ways: list[tuple[str, Callable[[], LoweredProgram]]] = []
    for words, kinds in _axis_types(call, found, types):
        target = AbstractMesh(tuple(degrees.values()), tuple(degrees), axis_types=kinds, abstract_device=device)
        moved = for_target(call, target)
        if mesh is None and current_mesh() is None:
            ways.append(("as it is called", partial(lower_call, moved, platform)))
        ways.append((f"with its mesh in use, {words}", partial(_lower_under, target, moved, platform)))
    return ways


def _lower_under(target: AbstractMesh, call: Call, platform: str) -> LoweredProgram:
    with only_mesh(target):
        return lower_call(call, platform)


def _mesh_of(call: Call, mesh: MeshLike | None) -> MeshLike | None:
    """Return the given mesh, else that of the arguments, else the one in use."""
    return mesh if mesh is not None else next(meshes_in(call), current_mesh())


def _mesh_held(call: Call, count: int) -> MeshLike | None:
    """Return the mesh of `count` devices in a function's closure; None if there is none, or more than one."""
    try:
        held = {mesh for mesh in held_meshes(call.function) if math.prod(mesh.shape.values()) == count}
    except NOT_COPIED:
        return None
    return next(iter(held)) if len(held) == 1 else None


def _mesh_of_module(program: LoweredProgram) -> dict[str, int] | None:
    """Return {axis: degree} of a lowered module's mesh with most axes. Meshes with reordered devices do not count."""
    module = program.lowered.compiler_ir("stablehlo")
    found = [_SDY_MESH.match(str(op)) for op in module.body.operations] if module is not None else []
    meshes = [{axis: int(degree) for axis, degree in _SDY_AXIS.findall(one[1])} for one in found if one]
    return max(filter(None, meshes), key=len, default=None)


def _inspect_in_child(name: str, request: CompileRequest, check_options: Mapping[str, Any]) -> Inspection:
    system = parse_system(request.hardware)
    try:
        program: CompiledProgram = compile_in_child(request)
    except DoesNotFitError as error:
        raise DoesNotFitError(str(error).replace(request.function, name), error.hlo) from None
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
        **check_options,
    )


def _on_devices_here(mesh: MeshLike, types: tuple[AxisType, ...]) -> Mesh:
    """A mesh of given degrees and types over devices of this process."""
    degrees = degrees_of(mesh)
    count, there = math.prod(degrees.values()), jax.device_count()
    if count > there:
        raise MeshwrightError(f"the mesh has {count} devices and {there} are here; on='cpu:{count}' simulates as many")
    return jax.make_mesh(tuple(degrees.values()), tuple(degrees), axis_types=types, devices=jax.devices()[:count])


def _system(devices: Sequence[Any], count: int) -> System | None:
    """Return the system of `count` devices like these: simulated CPU devices, or known GPUs; None for others."""
    kind = devices[0].device_kind.lower()
    chip = "cpu" if devices[0].platform == "cpu" else next((name for name in chip_names() if name in kind), None)
    return parse_system(f"{chip}:{count}") if chip and devices[0].platform in ("cpu", "gpu") else None


@contextmanager
def _capture_stderr() -> Iterator[Any]:
    """Context that captures what C++ code writes to stderr. Yields a function that returns the text afterwards."""
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
