"""A function lowered for a mesh, in this process or in the one that compiles for devices that are not here.

What goes to that process is pickled by value (cloudpickle), closures included; every mesh in it stands for the mesh
that the program is compiled for, axis by axis.
"""

from __future__ import annotations

import base64
import hashlib
import io
import pickle
import site
import sys
import sysconfig
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import cloudpickle
import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, SingleDeviceSharding

import meshwright
from meshwright.compiler.named import load_function
from meshwright.errors import MeshwrightError
from meshwright.hardware import canonical_dtype
from meshwright.inspection.checks.constraints import UNUSED

LOWER_PICKLED = "meshwright.inspection.lower:lower_pickled"
LOWER_NAMED = "meshwright.inspection.lower:lower_named"


def trace(function: Any, args: Sequence[Any], mesh: Mesh | None) -> jax.stages.Traced:
    """A function traced on some arguments, under the mesh where there is one."""
    jitted = function if hasattr(function, "trace") else jax.jit(function)
    with _under(mesh):
        return jitted.trace(*args)


def lower(traced: jax.stages.Traced, mesh: Mesh | None) -> jax.stages.Lowered:
    """A traced function lowered, under the mesh where there is one."""
    with _under(mesh):
        return traced.lower()


def unused_constraints(traced: jax.stages.Traced) -> tuple[str, ...]:
    """A line, as compilers log it, on each constraint whose result nothing takes: JAX drops it when it lowers."""
    now = time.strftime("W%m%d %H:%M:%S")
    return tuple(dict.fromkeys(f"{now} {line}" for line in _unused(traced.jaxpr.jaxpr)))


def lower_pickled(mesh: Mesh, *, payload: str, types: Sequence[str], sources: str) -> jax.stages.Lowered:
    """The function and arguments that `pack` made a payload of, lowered for a mesh with some axis types.

    sources: what they import, hashed; only so that another program is not taken for the same.
    """
    del sources
    mesh = _with_types(mesh, types)
    function, args = _Unpickler(io.BytesIO(base64.b64decode(payload)), mesh).load()
    return _lower_aloud(function, args, mesh)


def lower_named(mesh: Mesh, *, function: str, types: Sequence[str], sources: str) -> jax.stages.Lowered:
    """What `module:function` makes for a mesh, lowered: it takes the mesh and returns a Lowered or (function, args)."""
    del sources
    mesh = _with_types(mesh, types)
    made = load_function(function)(mesh)
    if isinstance(made, jax.stages.Lowered):
        return made
    if not (isinstance(made, tuple) and len(made) == 2 and callable(made[0]) and isinstance(made[1], (tuple, list))):
        raise MeshwrightError(
            f"{function} returned {type(made).__name__}; it must return jax.jit(...).lower(...) or (function, args)"
        )
    return _lower_aloud(made[0], made[1], mesh)


def pack(function: Any, args: Sequence[Any]) -> str:
    """A function and its arguments as text, for `lower_pickled`; arrays become shapes with their shardings.

    Raises where they hold something of this process, as a device or an open file.
    """
    out = io.BytesIO()
    try:
        _Pickler(out).dump((function, tuple(abstract(args))))
    except (TypeError, pickle.PicklingError, AttributeError) as error:
        raise MeshwrightError(f"{name_of(function)} cannot go to the process that compiles: {error}") from None
    return base64.b64encode(out.getvalue()).decode()


def abstract(tree: Any) -> Any:
    """A tree with its arrays as shapes, dtypes and shardings; one on a single device has none."""
    return jax.tree.map(_abstract_leaf, tree)


def source_hash() -> str:
    """A hash over the Python files that this process has imported, those of installed packages left out.

    A function is pickled by name where its module can be imported, so the name alone does not say what it does.
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


def name_of(function: Any) -> str:
    """What a function is called."""
    return getattr(function, "__name__", type(function).__name__)


def _lower_aloud(function: Any, args: Sequence[Any], mesh: Mesh) -> jax.stages.Lowered:
    """A function lowered, what there is to say of it written to stderr, which the other process reads."""
    traced = trace(function, args, mesh)
    for line in unused_constraints(traced):
        print(line, file=sys.stderr, flush=True)
    return lower(traced, mesh)


def _under(mesh: Mesh | None) -> AbstractContextManager[Any]:
    """The context of a mesh, or none."""
    return nullcontext() if mesh is None else jax.set_mesh(mesh)


class _Pickler(cloudpickle.Pickler):
    """Leaves meshes out: each is known by its axes, and is another in the process that compiles."""

    def persistent_id(self, obj: Any) -> Any:
        """The names and types of a mesh's axes; None of anything else."""
        if isinstance(obj, (Mesh, AbstractMesh)):
            types = tuple(kind.name for kind in obj.axis_types)
            return type(obj).__name__, tuple(obj.axis_names), types
        if isinstance(obj, jax.Device):
            raise TypeError(f"it holds the device {obj}; let it hold the mesh, or make what needs devices inside")
        return None

    def reducer_override(self, obj: Any) -> Any:
        """A jitted function along with the two attributes that its own pickling forgets (JAX 0.10.2)."""
        if hasattr(obj, "_jit_info"):
            make, arguments, state, *_ = obj.__reduce_ex__(2)
            return _rejit, (make, arguments, state, obj._fun, obj._jit_info)
        return super().reducer_override(obj)


class _Unpickler(pickle.Unpickler):
    """Puts the mesh that is compiled for in the place of every mesh."""

    def __init__(self, file: io.BytesIO, mesh: Mesh) -> None:
        super().__init__(file)
        self.mesh = mesh

    def persistent_load(self, pid: Any) -> Any:
        """The mesh for the names and types of some axes."""
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
    """The jitted function that `_Pickler` took apart."""
    jitted = make(*arguments)
    jitted.__setstate__(state)
    jitted._fun, jitted._jit_info = function, info
    return jitted


def _abstract_leaf(leaf: Any) -> Any:
    """One argument without its data; what is no array stays as it is."""
    if not (hasattr(leaf, "shape") and hasattr(leaf, "dtype")):
        return leaf
    sharding = getattr(leaf, "sharding", None)
    if sharding is None or isinstance(sharding, SingleDeviceSharding):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
    if not isinstance(sharding, NamedSharding):
        raise TypeError(f"an argument has a {type(sharding).__name__}; use a NamedSharding, whose axes have names")
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def _with_types(mesh: Mesh, types: Sequence[str]) -> Mesh:
    """The same devices with axes of some types: Auto, Explicit, Manual."""
    return Mesh(mesh.devices, mesh.axis_names, axis_types=tuple(AxisType[kind] for kind in types))


def _unused(jaxpr: Any) -> Iterator[str]:
    """A line on each constraint of a jaxpr, and of those inside it, whose result nothing takes."""
    used = {id(var) for eqn in jaxpr.eqns for var in eqn.invars} | {id(var) for var in jaxpr.outvars}
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "sharding_constraint" and id(eqn.outvars[0]) not in used:
            aval = eqn.outvars[0].aval
            dims = ",".join(map(str, aval.shape))
            yield f"{UNUSED} on {canonical_dtype(aval.dtype.name)}[{dims}] at {_place(eqn)}"
        for inner in jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda one: hasattr(one, "eqns")):
            if hasattr(inner, "eqns"):
                yield from _unused(getattr(inner, "jaxpr", inner))


def _place(eqn: Any) -> str:
    """file:line of the user's code that an equation comes from."""
    traceback = eqn.source_info.traceback
    frames = traceback.frames if traceback is not None else []
    own = Path(jax.__file__).parent
    frame = next((one for one in frames if not Path(one.file_name).is_relative_to(own)), None)
    return f"{frame.file_name}:{frame.line_num}" if frame else "an unknown line"
