"""Meshes of a call: those of its arguments, the one in use, and copies of the call with another mesh."""

from __future__ import annotations

import io
import pickle
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from types import CodeType
from typing import Any, NamedTuple

import cloudpickle
import jax
import numpy as np
from jax.experimental.layout import Format, Layout
from jax.interpreters import pxla
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, SingleDeviceSharding

from meshwright.errors import MeshwrightError
from meshwright.units import show_mesh

MeshLike = Mesh | AbstractMesh | Mapping[str, int]


class Call(NamedTuple):
    """A function and its arguments."""

    function: Any
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = {}


def meshes_in(tree: Any) -> Iterator[Mesh | AbstractMesh]:
    """Yield the meshes in the shardings of a tree's leaves."""
    for leaf in jax.tree.leaves(tree):
        sharding = getattr(leaf, "sharding", None)
        if isinstance(sharding, NamedSharding):
            yield sharding.mesh


def current_mesh() -> Mesh | None:
    """Return the mesh of `jax.set_mesh`, else that of `with mesh:`; None if neither is in use."""
    with warnings.catch_warnings():  # `with mesh:` and the only name of its mesh are deprecated
        warnings.simplefilter("ignore", DeprecationWarning)
        of_older_code = pxla.thread_resources.env.physical_mesh
    return next((mesh for mesh in (jax.sharding.get_mesh(), of_older_code) if not mesh.empty), None)


def degrees_of(mesh: MeshLike) -> dict[str, int]:
    """Return the axes of a mesh and their degrees, outermost first."""
    return dict(mesh.shape) if isinstance(mesh, (Mesh, AbstractMesh)) else dict(mesh)


def set_mesh(mesh: Mesh | None) -> AbstractContextManager[Any]:
    """Use a mesh with `jax.set_mesh`, unless it is None or in use already."""
    return nullcontext() if mesh is None or mesh == current_mesh() else jax.set_mesh(mesh)


@contextmanager
def only_mesh(mesh: AbstractMesh) -> Iterator[None]:
    """Make an abstract mesh the only one in use inside the context, whatever is in use outside."""
    none = Mesh(np.empty((), dtype=object), ())
    with ExitStack() as stack:
        if current_mesh() is not None:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # of `with mesh:`, in code that uses it
                stack.enter_context(none)
            stack.enter_context(jax.set_mesh(none))
        stack.enter_context(jax.sharding.use_abstract_mesh(mesh))
        yield


def on_mesh(tree: Any, mesh: Mesh) -> Any:
    """Return a tree with `mesh` in place of every abstract mesh in its leaves' shardings."""
    return jax.tree.map(lambda leaf: _abstract_leaf(leaf, mesh) if _is_on_abstract_mesh(leaf) else leaf, tree)


def for_target(call: Call, target: AbstractMesh) -> Call:
    """Return a call with every mesh replaced by the target's, and with abstract arguments.

    A function with a mesh in its closure is copied with cloudpickle; imported modules are not copied.

    Raises:
        MeshwrightError: the call has axes that the target lacks, or the function cannot be copied and its mesh has
            other degrees.
    """
    args, kwargs = jax.tree.map(lambda leaf: _abstract_leaf(leaf, target), (tuple(call.args), dict(call.kwargs)))
    try:
        if not held_meshes(call.function):
            return Call(call.function, args, kwargs)
    except NOT_COPIED as error:
        others = [mesh for mesh in meshes_in(call) if degrees_of(mesh) != degrees_of(target)]
        if others:
            raise MeshwrightError(
                f"{function_name(call.function)} is for a mesh of {show_mesh(degrees_of(others[0]))} and cannot be"
                f" copied for one of {show_mesh(degrees_of(target))}: {error}"
            ) from None
        return Call(call.function, args, kwargs)
    try:  # Shared objects must stay identical: jit compares the optimizer in a state with that in its shardings.
        return Call(*_copied((call.function, args, kwargs), target))
    except (*NOT_COPIED, ValueError):
        return Call(_copied(call.function, target), args, kwargs)


def held_meshes(function: Any) -> list[Mesh | AbstractMesh]:
    """Return the meshes in a function's closure. Raises one of `NOT_COPIED` if the closure cannot be copied."""
    pickler = _Pickler(io.BytesIO())
    pickler.dump(function)
    return pickler.meshes


NOT_COPIED = (TypeError, pickle.PicklingError, AttributeError, RecursionError)
"""Errors of cloudpickle for objects that it cannot copy."""


def _copied(held: Any, target: AbstractMesh) -> Any:
    """Return a copy of `held` with `target` in place of the meshes that have only axes of the target."""
    out = io.BytesIO()
    pickler = _Pickler(out)
    pickler.dump(held)
    return _Unpickler(out.getvalue(), target, pickler.kept).load()


def function_name(function: Any) -> str:
    """The name of a function, for messages."""
    return getattr(function, "__name__", None) or type(function).__name__


class _Pickler(cloudpickle.Pickler):
    """Pickler that puts meshes, and objects that must not be copied, in `kept`."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.kept: list[Any] = []
        self.meshes: list[Mesh | AbstractMesh] = []

    def persistent_id(self, obj: Any) -> Any:
        """Return the number in `kept` of a mesh or of an object that is not copied; None for anything else."""
        if isinstance(obj, (Mesh, AbstractMesh)):
            self.meshes.append(obj)
        is_here = isinstance(obj, jax.Array) and len(obj.sharding.device_set) == 1
        if is_here or isinstance(obj, (Mesh, AbstractMesh, type, jax.Device)) or _is_named(obj):
            self.kept.append(obj)
            return len(self.kept) - 1
        return None

    def reducer_override(self, obj: Any) -> Any:
        """Reduce objects that JAX or cloudpickle would copy incorrectly.

        JAX (0.10.2): jitted functions lose two attributes, custom derivatives fail. cloudpickle (3.1.3): code loses its
        file name, so that findings would point to `<dynamic-code>`.
        """
        if isinstance(obj, CodeType):
            make, arguments, *_ = self.dispatch_table[CodeType](obj)
            return _recode, (make, arguments, obj.co_filename)
        if isinstance(obj, (jax.custom_vjp, jax.custom_jvp)):
            return object.__new__, (type(obj),), dict(vars(obj)), None, None, _fill
        if hasattr(obj, "_jit_info"):
            make, arguments, state, *_ = obj.__reduce_ex__(2)
            return _rejit, (make, arguments, state, obj._fun, obj._jit_info)
        return super().reducer_override(obj)


class _Unpickler(pickle.Unpickler):
    """Unpickler that puts the target in the place of every mesh that has only axes of the target."""

    def __init__(self, data: bytes, target: AbstractMesh, kept: Sequence[Any]) -> None:
        super().__init__(io.BytesIO(data))
        self.target, self.kept = target, kept

    def persistent_load(self, pid: Any) -> Any:
        """Return the object stored under a number; the target if it is a mesh that has only axes of the target."""
        kept = self.kept[pid]
        is_for_it = isinstance(kept, (Mesh, AbstractMesh)) and set(kept.axis_names) <= set(self.target.axis_names)
        return _like(self.target, kept.axis_names, kept.axis_types) if is_for_it else kept


def _like(target: AbstractMesh, names: Sequence[str], types: Sequence[AxisType]) -> AbstractMesh:
    """Return the target with the axis types of the mesh that it replaces."""
    if set(names) - set(target.axis_names):
        raise MeshwrightError(
            f"the function or its arguments have a mesh of axes {', '.join(names)};"
            f" it is to be compiled for axes {', '.join(target.axis_names)}"
        )
    by_name = dict(zip(names, types, strict=True))
    # Axes that are not on the old mesh get the type of its first axis: the program does not name them.
    kinds = tuple(by_name.get(name, types[0] if types else AxisType.Auto) for name in target.axis_names)
    return AbstractMesh(target.axis_sizes, target.axis_names, axis_types=kinds, abstract_device=target.abstract_device)


def _recode(make: Any, arguments: Any, file: str) -> CodeType:
    """Rebuild a code object with cloudpickle, and restore its file name."""
    return make(*arguments).replace(co_filename=file)


def _rejit(make: Any, arguments: Any, state: Any, function: Any, info: Any) -> Any:
    """Rebuild a jitted function from what `_Pickler.reducer_override` returned."""
    jitted = make(*arguments)
    jitted.__setstate__(state)
    jitted._fun, jitted._jit_info = function, info
    return jitted


def _fill(made: Any, attributes: Mapping[str, Any]) -> None:
    """Set the attributes of a newly created object."""
    vars(made).update(attributes)


def _is_named(obj: Any) -> bool:
    """Whether an object can be imported by its name, as `jax.nn.relu`, and is not from the running script."""
    module, name = getattr(obj, "__module__", None), getattr(obj, "__qualname__", None)
    if module == "__main__" or not isinstance(module, str) or not isinstance(name, str):
        return False
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    return found is obj


def _is_on_abstract_mesh(leaf: Any) -> bool:
    sharding = getattr(leaf, "sharding", None)
    return isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, AbstractMesh)


def _abstract_leaf(leaf: Any, mesh: Mesh | AbstractMesh) -> Any:
    """Return an array as shape, dtype, weak type, layout, memory kind and sharding, the sharding on `mesh`."""
    if not (hasattr(leaf, "shape") and hasattr(leaf, "dtype")):
        return leaf
    weak = bool(getattr(leaf, "weak_type", False))
    sharding = getattr(leaf, "sharding", None)
    if sharding is None or isinstance(sharding, SingleDeviceSharding):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, weak_type=weak)
    if not isinstance(sharding, NamedSharding):
        raise MeshwrightError(
            f"an argument has a {type(sharding).__name__}; use a NamedSharding, whose axes have names"
        )
    if isinstance(mesh, AbstractMesh):
        mesh = _like(mesh, sharding.mesh.axis_names, sharding.mesh.axis_types)
    order = getattr(getattr(getattr(leaf, "format", None), "layout", None), "major_to_minor", None)
    # Row-major is the default.
    layout = None if order is None or tuple(order) == tuple(range(len(leaf.shape))) else Layout(tuple(order))
    if layout is not None and isinstance(mesh, AbstractMesh):
        raise MeshwrightError(
            f"an argument {leaf.dtype}{list(leaf.shape)} asks for the layout {layout.major_to_minor}, which JAX lowers"
            f" only for devices that are here; leave its layout to the compiler, or inspect it without on="
        )
    is_default = sharding.memory_kind in (None, "device", "unpinned_host")
    moved = NamedSharding(mesh, sharding.spec, memory_kind=None if is_default else sharding.memory_kind)
    placed = moved if layout is None else Format(layout, moved)
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=placed, weak_type=weak)
