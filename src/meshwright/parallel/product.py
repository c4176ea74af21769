"""A way to a sharded product, executed in each of JAX's three modes.

The way is the same in all of them: collectives, free slices and local products in order. What differs is who says so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from meshwright.errors import MeshwrightError
from meshwright.notation import Communicate, Inference, Multiply, ShardedArray, Slice, Way

Mode = Literal["auto", "explicit", "manual"]

MODES: tuple[Mode, ...] = ("auto", "explicit", "manual")
"""auto: einsums, and a constraint on what each step leaves; the partitioner finds the collectives. explicit: shardings
in types; each step changes the type of its value. manual: every device's own program, each collective called by name.
"""

Values = dict[str, Array]
"""Arrays by the label that the steps know them under."""


@dataclass(frozen=True)
class CompiledProduct:
    """A way compiled for a mesh; `hlo` is the text of the program."""

    inference: Inference
    mesh: Mesh
    program: jax.stages.Compiled

    @property
    def hlo(self) -> str:
        """The optimized program, as `compiled.parse_hlo` reads it."""
        return self.program.as_text() or ""

    def run(self, *arrays: Any) -> Array:
        """The global result, laid as the inference says; a sum that was left to take is taken after the program.

        arrays: the global operands in the order of the inference, of the shapes and the dtype it was compiled for.
        """
        operands = self.inference.operands
        _check_arrays(self.inference, arrays)
        placed = [_place(value, array, self.mesh) for value, array in zip(arrays, operands, strict=True)]
        result = self.program(*placed)
        if not self.inference.result.unreduced:
            return result
        with jax.set_mesh(self.mesh):
            return jax.reshard(result, _dims_spec(self.inference.result))


def run_product(
    inference: Inference, arrays: Sequence[Any], mesh: Mesh, *, mode: Mode = "explicit", way: Way | None = None
) -> Array:
    """The global result of executing a way on a mesh: equal to the unsharded einsum, laid as the inference says."""
    dtype = jnp.result_type(*arrays)
    return compile_product(inference, mesh, mode=mode, way=way, dtype=dtype).run(*arrays)


def compile_product(
    inference: Inference, mesh: Mesh, *, mode: Mode = "explicit", way: Way | None = None, dtype: Any = np.float32
) -> CompiledProduct:
    """The program of a way, that of the inference if none is said.

    mesh: its axes are those of the inference, with their degrees; the types of its axes do not matter, since the mode
    has its own. Raises for another mesh, and in auto mode for a result that stays a sum.
    """
    way = way or inference.way
    _check_mesh(inference, mesh)
    if mode == "auto" and way.result.unreduced:
        raise MeshwrightError(
            f"auto mode has no type for {way.result}, a sum still to be taken; use explicit or manual"
        )
    types = AxisType.Auto if mode == "auto" else AxisType.Explicit
    mesh = Mesh(mesh.devices, mesh.axis_names, axis_types=(types,) * len(mesh.axis_names))
    body = {"auto": _automatic, "explicit": _explicit, "manual": _manual}[mode](inference, way, mesh)
    abstract = [_abstract(array, inference, mesh, dtype) for array in inference.operands]
    with jax.set_mesh(mesh):
        return CompiledProduct(inference, mesh, jax.jit(body).lower(*abstract).compile())


def make_product_mesh(degrees: Mapping[str, int], devices: Sequence[Any] | None = None) -> Mesh:
    """The mesh of named degrees, the first axis outermost, over `devices` or the first of those there are."""
    size = int(np.prod(list(degrees.values())))
    found = jax.devices() if devices is None else devices
    if len(found) < size:
        raise MeshwrightError(f"the mesh has {size} devices; {len(found)} are there")
    return jax.make_mesh(tuple(degrees.values()), tuple(degrees), devices=found[:size])


def _automatic(inference: Inference, way: Way, mesh: Mesh) -> Callable[..., Array]:
    """Auto mode: the result of each step constrained. A sum still to be taken has no spec, so the next step says it."""

    def constrained(value: Array, array: ShardedArray) -> Array:
        if array.unreduced:
            return value
        return lax.with_sharding_constraint(value, NamedSharding(mesh, _dims_spec(array)))

    def multiply(step: Multiply, left: Array, right: Array) -> Array:
        return constrained(jnp.einsum(step.formula, left, right), step.result)

    def move(step: Communicate | Slice, value: Array) -> Array:
        return constrained(value, step.result)

    def body(*stored: Array) -> Array:
        values = [x.sum(0) if a.unreduced else x for x, a in zip(stored, inference.operands, strict=True)]
        return _execute(inference, way, values, multiply, move)

    return body


def _explicit(inference: Inference, way: Way, mesh: Mesh) -> Callable[..., Array]:
    """Explicit mode: the type of each value is the notation's, a sum still to be taken included."""

    def multiply(step: Multiply, left: Array, right: Array) -> Array:
        return jnp.einsum(step.formula, left, right, out_sharding=_spec(step.result))

    def move(step: Communicate | Slice, value: Array) -> Array:
        return jax.reshard(value, _spec(step.result))

    def body(*stored: Array) -> Array:
        values = [
            lax.reduce_sum(x, (0,), out_sharding=_spec(a)) if a.unreduced else x
            for x, a in zip(stored, inference.operands, strict=True)
        ]
        return _execute(inference, way, values, multiply, move)

    return body


def _manual(inference: Inference, way: Way, mesh: Mesh) -> Callable[..., Array]:
    """Manual mode: the program of one device, whose values are shards."""

    def multiply(step: Multiply, left: Array, right: Array) -> Array:
        return jnp.einsum(step.formula, left, right)

    def move(step: Communicate | Slice, value: Array) -> Array:
        return _cut(step, value) if isinstance(step, Slice) else _communicate(step, value)

    def body(*stored: Array) -> Array:
        values = [x[0] if a.unreduced else x for x, a in zip(stored, inference.operands, strict=True)]
        return _execute(inference, way, values, multiply, move)

    specs = tuple(_stored_spec(array) for array in inference.operands)
    return jax.shard_map(body, in_specs=specs, out_specs=_spec(way.result))


def _execute(
    inference: Inference,
    way: Way,
    operands: Sequence[Array],
    multiply: Callable[[Multiply, Array, Array], Array],
    move: Callable[[Communicate | Slice, Array], Array],
) -> Array:
    """The result of the steps, each reading its operands by label."""
    values = {array.label: value for array, value in zip(inference.operands, operands, strict=True)}
    for step in way.steps:
        with jax.named_scope(type(step).__name__.lower()):
            if isinstance(step, Multiply):
                left, right = (values.pop(operand.label) for operand in step.operands)
                values[step.result.label] = multiply(step, left, right)
            else:
                values[step.result.label] = move(step, values.pop(step.operand.label))
    (result,) = values.values()
    return result


def _communicate(step: Communicate, shard: Array) -> Array:
    """A collective on one device's shard."""
    source, target = step.source, step.target
    match step.kind:
        case "all-gather":
            return lax.all_gather(shard, step.axes, axis=source, tiled=True, to="invarying")
        case "all-reduce":
            return lax.psum(shard, step.axes)
        case "reduce-scatter":
            return lax.psum_scatter(shard, step.axes, scatter_dimension=target, tiled=True)
        case "all-to-all":
            return lax.all_to_all(shard, step.axes, split_axis=target, concat_axis=source, tiled=True)
    raise MeshwrightError(f"a {step.kind} is no step of a product")


def _cut(step: Slice, shard: Array) -> Array:
    """The part of its shard that a device keeps."""
    size = shard.shape[step.target] // lax.axis_size(step.axes)
    return lax.dynamic_slice_in_dim(shard, lax.axis_index(step.axes) * size, size, step.target)


def _spec(array: ShardedArray) -> P:
    """How an array lies, a sum still to be taken included."""
    return P(*_dims_spec(array), unreduced=frozenset(array.unreduced))


def _dims_spec(array: ShardedArray) -> P:
    """The mesh axes on each dim of an array."""
    return P(*(axes or None for axes in array.axes))


def _stored_spec(array: ShardedArray) -> P:
    """How an operand is stored: one that is a sum with its terms in a dim of their own, in front."""
    return P(array.unreduced, *_dims_spec(array)) if array.unreduced else _dims_spec(array)


def _abstract(array: ShardedArray, inference: Inference, mesh: Mesh, dtype: Any) -> jax.ShapeDtypeStruct:
    """An operand as it is stored, for lowering."""
    shape = tuple(inference.sizes.dims[dim] for dim in array.dims)
    terms = (inference.sizes.degree(array.unreduced),) if array.unreduced else ()
    return jax.ShapeDtypeStruct(terms + shape, dtype, sharding=NamedSharding(mesh, _stored_spec(array)))


def _place(value: Any, array: ShardedArray, mesh: Mesh) -> Array:
    """An operand as it is stored; of a sum the first term is the whole and the others are zero."""
    value = np.asarray(value)
    if array.unreduced:
        terms = [value] + [np.zeros_like(value)] * (int(np.prod([mesh.shape[a] for a in array.unreduced])) - 1)
        value = np.stack(terms)
    return jax.device_put(value, NamedSharding(mesh, _stored_spec(array)))


def _check_mesh(inference: Inference, mesh: Mesh) -> None:
    """Raise for a mesh that is not the one inferred for."""
    if dict(mesh.shape) != dict(inference.sizes.degrees):
        raise MeshwrightError(
            f"the product was inferred for {_named(inference.sizes.degrees)}; this mesh has {_named(mesh.shape)}"
        )


def _check_arrays(inference: Inference, arrays: Sequence[Any]) -> None:
    """Raise for operands of another number or shape."""
    if len(arrays) != len(inference.operands):
        raise MeshwrightError(f"the product has {len(inference.operands)} operands; {len(arrays)} are given")
    for value, array in zip(arrays, inference.operands, strict=True):
        shape = tuple(inference.sizes.dims[dim] for dim in array.dims)
        if np.shape(value) != shape:
            raise MeshwrightError(f"{array} has the shape {list(shape)}; the array given has {list(np.shape(value))}")


def _named(degrees: Mapping[str, int]) -> str:
    """Degrees as people type them."""
    return ",".join(f"{axis}={degree}" for axis, degree in degrees.items())
