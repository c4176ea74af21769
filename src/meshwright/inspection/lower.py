"""Lower a function for a mesh, in this process or in a child process that compiles.

Functions are pickled by value for the child (cloudpickle), closures included. Every mesh in them stands for the mesh of
the target, axis by axis.
"""

from __future__ import annotations

import base64
import hashlib
import io
import pickle
import site
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import cloudpickle
import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, SingleDeviceSharding

import meshwright
from meshwright.compiler import LoweredProgram, UnusedConstraint
from meshwright.compiler.load import load_function
from meshwright.errors import MeshwrightError
from meshwright.hardware import canonical_dtype

LOWER_PICKLED = "meshwright.inspection.lower:lower_pickled"
LOWER_NAMED = "meshwright.inspection.lower:lower_named"


def trace(function: Any, args: Sequence[Any], mesh: Mesh | None) -> jax.stages.Traced:
    """Trace a function under the mesh, if there is one."""
    jitted = function if hasattr(function, "trace") else jax.jit(function)
    with _mesh_context(mesh):
        return jitted.trace(*args)


def lower(traced: jax.stages.Traced, mesh: Mesh | None) -> jax.stages.Lowered:
    """Lower a traced function under the mesh, if there is one."""
    with _mesh_context(mesh):
        return traced.lower()


def unused_constraints(traced: jax.stages.Traced) -> tuple[UnusedConstraint, ...]:
    """The sharding constraints whose results nothing uses: JAX drops them when it lowers."""
    return tuple(dict.fromkeys(_unused(traced.jaxpr.jaxpr)))


def lower_pickled(mesh: Mesh, *, payload: str, types: Sequence[str], sources: str) -> LoweredProgram:
    """Lower the function and arguments of `pack` for a mesh with given axis types.

    sources: a hash of what they import; only distinguishes cache entries.
    """
    del sources
    mesh = _with_types(mesh, types)
    function, args = _Unpickler(io.BytesIO(base64.b64decode(payload)), mesh).load()
    return _lower_program(function, args, mesh)


def lower_named(mesh: Mesh, *, function: str, types: Sequence[str], sources: str) -> LoweredProgram:
    """Lower what `module:function` makes for a mesh: a Lowered, or (function, args)."""
    del sources
    mesh = _with_types(mesh, types)
    made = load_function(function)(mesh)
    if isinstance(made, jax.stages.Lowered):
        return LoweredProgram(made)
    if not (isinstance(made, tuple) and len(made) == 2 and callable(made[0]) and isinstance(made[1], (tuple, list))):
        raise MeshwrightError(
            f"{function} returned {type(made).__name__}; it must return jax.jit(...).lower(...) or (function, args)"
        )
    return _lower_program(made[0], made[1], mesh)


def pack(function: Any, args: Sequence[Any]) -> str:
    """Pickle a function and its abstract arguments as text, for `lower_pickled`.

    Raises where they hold an object of this process, as a device or an open file.
    """
    out = io.BytesIO()
    try:
        _Pickler(out).dump((function, tuple(abstract(args))))
    except (TypeError, pickle.PicklingError, AttributeError) as error:
        raise MeshwrightError(f"{function_name(function)} cannot go to the process that compiles: {error}") from None
    return base64.b64encode(out.getvalue()).decode()


def abstract(tree: Any) -> Any:
    """A tree with arrays replaced by shape, dtype and sharding; single-device shardings are dropped."""
    return jax.tree.map(_abstract_leaf, tree)


def source_hash() -> str:
    """A hash over the Python files this process has imported, without installed packages.

    Functions of importable modules are pickled by name, so the pickle alone does not identify the code.
    """
    own, library = Path(meshwright.__file__).parent, sysconfig.get_paths()["stdlib"]
    installed = [Path(path).resolve() for path in (*site.getsitepackages(), library, own)]
    files = {Path(file).resolve() for one in list(sys.modules.values()) if (file := getattr(one, "__file__", None))}
    digest = hashlib.sha256()
    for file in sorted(files):
        if file.suffix == ".py" and not any(file.is_relative_to(path) for path in installed) and file.is_file():
            digest.update(str(file).encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()


def meshes_in(args: Any) -> Iterator[Mesh | AbstractMesh]:
    """The meshes of the arguments' shardings."""
    for leaf in jax.tree.leaves(args):
        sharding = getattr(leaf, "sharding", None)
        if isinstance(sharding, NamedSharding):
            yield sharding.mesh


def function_name(function: Any) -> str:
    """The name of a function, for messages."""
    return getattr(function, "__name__", type(function).__name__)


def _lower_program(function: Any, args: Sequence[Any], mesh: Mesh) -> LoweredProgram:
    traced = trace(function, args, mesh)
    return LoweredProgram(lower(traced, mesh), unused_constraints(traced))


def _mesh_context(mesh: Mesh | None) -> AbstractContextManager[Any]:
    return nullcontext() if mesh is None else jax.set_mesh(mesh)


class _Pickler(cloudpickle.Pickler):
    """Replaces meshes by their axes: the compiling process has another mesh."""

    def persistent_id(self, obj: Any) -> Any:
        """Names and types of a mesh's axes; None for anything else."""
        if isinstance(obj, (Mesh, AbstractMesh)):
            types = tuple(kind.name for kind in obj.axis_types)
            return type(obj).__name__, tuple(obj.axis_names), types
        if isinstance(obj, jax.Device):
            raise TypeError(f"it holds the device {obj}; let it hold the mesh, or make what needs devices inside")
        return None

    def reducer_override(self, obj: Any) -> Any:
        """A jitted function with the two attributes that its own pickling drops (JAX 0.10.2)."""
        if hasattr(obj, "_jit_info"):
            make, arguments, state, *_ = obj.__reduce_ex__(2)
            return _rejit, (make, arguments, state, obj._fun, obj._jit_info)
        return super().reducer_override(obj)


class _Unpickler(pickle.Unpickler):
    """Replaces every pickled mesh by the target's mesh."""

    def __init__(self, file: io.BytesIO, mesh: Mesh) -> None:
        super().__init__(file)
        self.mesh = mesh

    def persistent_load(self, pid: Any) -> Any:
        """The target's mesh for the names and types of some axes."""
        kind, names, types = pid
        if set(names) - set(self.mesh.axis_names):
            raise MeshwrightError(
                f"the function or its arguments have a mesh of axes {', '.join(names)};"
                f" it is to be compiled for axes {', '.join(self.mesh.axis_names)}"
            )
        by_name = dict(zip(names, types, strict=True))
        # Axes that are not on the old mesh have no type there; they are not named either.
        kinds = [by_name.get(name, types[0] if types else "Auto") for name in self.mesh.axis_names]
        mesh = _with_types(self.mesh, kinds)
        return mesh if kind == "Mesh" else mesh.abstract_mesh


def _rejit(make: Any, arguments: Any, state: Any, function: Any, info: Any) -> Any:
    """The inverse of `_Pickler.reducer_override`."""
    jitted = make(*arguments)
    jitted.__setstate__(state)
    jitted._fun, jitted._jit_info = function, info
    return jitted


def _abstract_leaf(leaf: Any) -> Any:
    if not (hasattr(leaf, "shape") and hasattr(leaf, "dtype")):
        return leaf
    sharding = getattr(leaf, "sharding", None)
    if sharding is None or isinstance(sharding, SingleDeviceSharding):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
    if not isinstance(sharding, NamedSharding):
        raise TypeError(f"an argument has a {type(sharding).__name__}; use a NamedSharding, whose axes have names")
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def _with_types(mesh: Mesh, types: Sequence[str]) -> Mesh:
    """The same devices with other axis types: Auto, Explicit, Manual."""
    return Mesh(mesh.devices, mesh.axis_names, axis_types=tuple(AxisType[kind] for kind in types))


def _unused(jaxpr: Any) -> Iterator[UnusedConstraint]:
    """Unused constraints of a jaxpr and of the jaxprs inside it."""
    used = {id(var) for eqn in jaxpr.eqns for var in eqn.invars} | {id(var) for var in jaxpr.outvars}
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "sharding_constraint" and id(eqn.outvars[0]) not in used:
            aval = eqn.outvars[0].aval
            yield UnusedConstraint(canonical_dtype(aval.dtype.name), tuple(aval.shape), _place(eqn))
        for inner in jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda one: hasattr(one, "eqns")):
            if hasattr(inner, "eqns"):
                yield from _unused(getattr(inner, "jaxpr", inner))


def _place(eqn: Any) -> str:
    """file:line of the user code of an equation."""
    traceback = eqn.source_info.traceback
    frames = traceback.frames if traceback is not None else []
    own = Path(jax.__file__).parent
    frame = next((one for one in frames if not Path(one.file_name).is_relative_to(own)), None)
    return f"{frame.file_name}:{frame.line_num}" if frame else "an unknown line"
