"""Lower functions of JAX, Flax or Equinox as calling them would, in this process or in a compiling child process."""

from __future__ import annotations

import functools
import hashlib
import inspect
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.interpreters import mlir
from jax.sharding import AxisType, Mesh
from jax.stages import Compiled, Lowered, Traced

from meshwright.errors import MeshwrightError
from meshwright.execution.runtime.mesh import with_axis_type
from meshwright.proof.compiler.load import is_installed, load_function
from meshwright.proof.compiler.module import load_module, pack_module
from meshwright.proof.compiler.program import LoweredProgram, TracedMistake
from meshwright.proof.compiler.worker import error_text
from meshwright.proof.inspection.advice import DEVICES_ABSENT, advice
from meshwright.proof.inspection.jaxprs.read import read_mistakes
from meshwright.proof.inspection.meshes import Call, for_target, function_name, only_mesh
from meshwright.support.replaced import replaced

LOWER_NAMED = "meshwright.proof.inspection.lower:lower_named"

_STAGES = (Traced, Lowered, Compiled)


def stage_of(thing: Any) -> Any:
    """Return the `jax.stages` object inside a wrapper of Flax or Equinox; any other object unchanged."""
    for name in ("traced", "lowered", "compiled"):
        inner = thing if isinstance(thing, _STAGES) else getattr(thing, name, None)
        if isinstance(inner, _STAGES):
            return inner
    return thing


def lower_call(call: Call, platform: str | None = None) -> LoweredProgram:
    """Lower a call in the context of this thread.

    Accepts functions, jitted or not, objects with `.trace` or `.lower` as made by `nnx.jit` and `eqx.filter_jit`, and
    results of these methods.

    Args:
        call: the function and its arguments.
        platform: the platform to lower for, as in `lowering_platforms`; by default that of the devices.

    Raises:
        MeshwrightError: the method `.lower` of the function returns nothing that JAX lowered.
    """
    with _lowering_for(platform):
        stage = _stage(call)
        if isinstance(stage, Traced):
            return LoweredProgram(stage.lower(), *_mistakes(stage))
    if not isinstance(stage, Lowered):
        raise MeshwrightError(
            f"lowering {function_name(call.function)} returned {type(stage).__name__}, in which JAX lowered nothing"
        )
    return LoweredProgram(stage)


def first_that_lowers(name: str, ways: Sequence[tuple[str, Callable[[], LoweredProgram]]]) -> LoweredProgram:
    """Return the program of the first attempt that lowers, with a note on each attempt that failed before it.

    ways: for each attempt, a description and a function that lowers.

    Raises:
        MeshwrightError: every attempt fails.
    """
    failed: list[tuple[str, str, Exception]] = []
    for words, lower in ways:
        try:
            program = lower()
        except MeshwrightError:
            raise
        except Exception as error:  # A user's function may raise anything; another way may lower.
            failed.append((words, _in_a_line(error_text(error)), error))
            continue
        note = tuple(f"lowered {words}; {before}: {said}" for before, said, _ in failed)
        return program._replace(notes=(*program.notes, *note))
    said = dict.fromkeys(said for _, said, _ in failed)
    if len(said) == 1:
        raise MeshwrightError(f"{name} does not lower: {next(iter(said))}") from failed[-1][2]
    each = "; ".join(f"{words}: {text}" for words, text, _ in failed)
    raise MeshwrightError(f"{name} does not lower: {each}") from failed[-1][2]


def lower_named(mesh: Mesh, *, function: str, types: Sequence[str], sources: str) -> LoweredProgram:
    """Call `module:function` with a mesh and lower its result, in the child process.

    The result is a lowered or traced function, or (function, args). types: axis types of the mesh, tried in order.
    sources: a hash of imported files, which only distinguishes cache entries.
    """
    del sources
    make = load_function(function)
    ways = []
    for kind in types:
        typed = with_axis_type(mesh, AxisType[kind])
        ways.append((f"with {kind.lower()} axes", functools.partial(_lower_made, make, function, typed)))
    return first_that_lowers(function, ways)


def source_hash() -> str:
    """Return a hash over the Python files that this process has imported, without installed packages."""
    files = {Path(file).resolve() for one in list(sys.modules.values()) if (file := getattr(one, "__file__", None))}
    digest = hashlib.sha256()
    for file in sorted(files):
        if file.suffix == ".py" and not is_installed(file) and file.is_file():
            digest.update(str(file).encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()


def _lower_made(make: Any, name: str, mesh: Mesh) -> LoweredProgram:
    """Call `make` with a mesh, and lower what it returns: a traced or lowered function, or (function, args).

    name: of `make`, for errors.
    """
    try:
        made = make(mesh)
    except Exception as error:
        if not re.search(DEVICES_ABSENT, str(error)):
            raise
        return _lower_placed(make, name, mesh)
    if isinstance(stage_of(made), (Lowered, Traced)):
        return lower_call(Call(made))
    call = _call_of(made, name)
    with jax.set_mesh(mesh):
        return lower_call(call)


def _lower_placed(make: Any, name: str, mesh: Mesh) -> LoweredProgram:
    """Lower for `mesh`, whose devices are only described, a function that needs arrays on devices.

    `make` is called with a mesh of as many CPU devices, on which it can create arrays. It returns (function, args), and
    the function is lowered with the shapes of its arguments, sharded on `mesh`. name: of `make`, for errors.
    """
    target = mesh.abstract_mesh
    devices = np.array(jax.devices("cpu")[: mesh.size]).reshape(mesh.devices.shape)
    made = make(Mesh(devices, mesh.axis_names, axis_types=mesh.axis_types))
    if isinstance(stage_of(made), (Lowered, Traced)):
        raise MeshwrightError(
            f"{name} places arrays on hardware that is not here and lowers its function for them; return (function,"
            f" args) instead, or use jax.ShapeDtypeStruct(shape, dtype, sharding=…) in the place of arrays"
        )
    call = for_target(_call_of(made, name), target)
    platform = mesh.devices.flat[0].platform
    with only_mesh(target):
        program = lower_call(call, {"gpu": "cuda"}.get(platform, platform))
    return load_module(mesh, **pack_module(program))


def _call_of(made: Any, name: str) -> Call:
    """Convert `(function, args)`, returned by the function `name`, to a `Call`. Raises for another result."""
    if not (isinstance(made, tuple) and len(made) == 2 and callable(made[0]) and isinstance(made[1], (tuple, list))):
        raise MeshwrightError(
            f"{name} returned {type(made).__name__}; it must return jax.jit(...).lower(...) or (function, args)"
        )
    return Call(made[0], tuple(made[1]))


def _stage(call: Call) -> Any:
    """Return a call as a `Traced`, or as a `Lowered` if its function has only `lower` and the `Traced` is not known."""
    function: Any = call.function
    args, kwargs = call.args, call.kwargs
    if isinstance(held := stage_of(function), _STAGES):
        if args or kwargs:
            raise MeshwrightError(f"a {type(held).__name__} has its arguments already; give none beside it")
        return held
    # A partial of a jitted function keeps the options of its jit, such as donation.
    while isinstance(function, functools.partial) and hasattr(function.func, "lower"):
        function, args, kwargs = function.func, (*function.args, *args), {**function.keywords, **kwargs}
    if callable(trace := getattr(function, "trace", None)):
        return stage_of(trace(*args, **kwargs))
    if callable(lower := getattr(function, "lower", None)):
        return _traced_by(lower, args, kwargs)
    return jax.jit(function).trace(*args, **kwargs)


def _traced_by(lower: Any, args: Any, kwargs: Any) -> Any:
    """Call a method `.lower`. Return the `Traced` that it lowered; the method's result if it lowered none or several.

    This is for objects that have no `.trace` (Equinox). `Traced.lower` is replaced during the call, since there is no
    public way from a `Lowered` to its jaxpr.
    """
    traced, before = list[Traced](), Traced.lower

    def lower_and_keep(self: Traced, *given: Any, **options: Any) -> Lowered:
        traced.append(self)
        return before(self, *given, **options)

    with replaced(Traced, "lower", lower_and_keep):
        lowered = stage_of(lower(*args, **kwargs))
    return traced[0] if len(traced) == 1 else lowered


class _NoClient:
    """Stand-in for the client of a platform that is not present."""

    def make_python_callback_from_host_send_and_recv(self, *args: Any, **kwargs: Any) -> None:
        """Replace a TPU client's callback, which is needed only at run time."""


@contextmanager
def _lowering_for(platform: str | None) -> Iterator[None]:
    """Context in which JAX lowers functions for a platform that is not present; no change if `platform` is None.

    JAX 0.10 to 0.12 have no public API that does it in all cases, so inside the context:

    - `Traced.lower` gets `lowering_platforms`, for objects with `.lower` and no `.trace`, which call it without
      (Equinox);
    - `ModuleContext.get_backend` returns a stand-in, for `jax.debug.print` and other callbacks, which ask for the
      platform's client and do not use it;
    - JAX's check that `pure_callback` and `io_callback` have devices is off: lowering needs none.
    """
    if platform is None:
        yield
        return
    for owner, name, parameter in (
        (Traced, "lower", "lowering_platforms"),
        (mlir.ModuleContext, "get_backend", "optional"),
    ):
        if parameter not in inspect.signature(getattr(owner, name, lambda: None)).parameters:
            raise MeshwrightError(
                f"JAX {jax.__version__} has no {owner.__name__}.{name}({parameter}=…), by which a function is lowered"
                f" for {platform} without one; inspect it without on=, or take JAX 0.10 to 0.12"
            )
    lower, get_backend = Traced.lower, mlir.ModuleContext.get_backend

    def lower_for_platform(self: Traced, **given: Any) -> Lowered:
        lowering: Any = {"lowering_platforms": (platform,)} | given
        return lower(self, **lowering)

    def get_backend_if_any(self: Any, optional: bool = False) -> Any:
        try:
            found = get_backend(self, optional=True)
        except RuntimeError:
            found = None
        return found or (None if optional else _NoClient())

    # If a version of JAX keeps them elsewhere, JAX itself refuses callbacks.
    dispatch = getattr(inspect.unwrap(jax.pure_callback), "__globals__", {}).get("dispatch")
    refused = getattr(dispatch, "prim_requires_devices_during_lowering", set())
    callbacks = {one for one in refused if one.name in ("pure_callback", "io_callback")}
    refused -= callbacks
    try:
        with (
            replaced(Traced, "lower", lower_for_platform),
            replaced(mlir.ModuleContext, "get_backend", get_backend_if_any),
        ):
            yield
    finally:
        refused |= callbacks


def _in_a_line(text: str) -> str:
    """Return an error in one line: its first line (three if that ends in a colon), its last location, and advice."""
    first, *rest = text.strip().split("\n")
    place = rest[-1].rpartition(" (")[2] if rest and rest[-1].endswith(")") else ""
    if first.endswith(":"):
        rest[-1:] = [rest[-1].removesuffix(f" ({place}")] if rest else []
        first = " ".join([first, *(line.strip() for line in rest if line.strip())][:3])
    told = f"{first} ({place}" if place else first
    return f"{told}; {what_to_do}" if (what_to_do := advice(text)) else told


def _mistakes(traced: Traced) -> tuple[tuple[TracedMistake, ...] | None, tuple[str, ...]]:
    """Return the mistakes in a function's jaxpr, and notes; None and a note if reading the jaxpr failed."""
    try:
        return tuple(read_mistakes(traced)), ()
    except Exception as error:  # A jaxpr of another version of JAX, or primitives of a library: the program is right.
        return None, (f"the jaxpr cannot be read ({type(error).__name__}: {error}), nor mistakes that only it shows",)
