"""Draw live JAX arrays, and anything with a shape, dtype and sharding: each device's shard. Trees become tables."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jax import ShapeDtypeStruct
from jax.core import Tracer
from jax.sharding import AbstractMesh, AxisType, NamedSharding, Sharding
from jax.tree_util import keystr, tree_flatten_with_path

from meshwright.description.step.rules import rules_of
from meshwright.errors import MeshwrightError
from meshwright.execution.runtime.sharding_context import ShardingContext
from meshwright.execution.training.step import abstract_batch, abstract_params
from meshwright.mesh import divisors
from meshwright.pictures.drawings.holdings import Holder, Holdings, Span, device_blocks
from meshwright.pictures.panels import Cell, Panel, Sketch
from meshwright.planning.plan import Plan
from meshwright.proof.program_plans.plan import ProgramPlan
from meshwright.units import show_bytes, show_count

Axes = tuple[tuple[str, ...], ...]


def live_holdings(array: Any, *, name: str = "array") -> Holdings:
    """Return each device's shard of a live array or a `jax.ShapeDtypeStruct`, with any kind of sharding.

    Devices have JAX's ids; on an abstract mesh they are numbered with the last axis fastest. Raises if the value is
    traced or has no sharding.

    name: the array's name in texts.
    """
    check_concrete(array, name)
    sharding = getattr(array, "sharding", None)
    if not isinstance(sharding, Sharding):
        raise MeshwrightError(f"{name} has no sharding; place it with jax.device_put, or pass text in the notation")
    shape = tuple(array.shape)
    axes = split_axes(sharding, len(shape))
    named = sharding if isinstance(sharding, NamedSharding) else None
    degrees = dict(named.mesh.shape) if named else {}
    # JAX does not check this for a `ShapeDtypeStruct`.
    for dim, (size, split) in enumerate(zip(shape, axes or (), strict=False)):
        degree = math.prod(degrees[axis] for axis in split)
        if size % degree:
            raise MeshwrightError(
                f"{name} of shape {shape} cannot be split so: dim {dim} over {'*'.join(split)}={degree} leaves"
                f" {size} % {degree} = {size % degree}; the degree must be one of {divisors(size)}"
            )
    return Holdings(
        label=f"{array.dtype}  {spec_text(sharding, len(shape))}",
        name=name,
        dims=tuple(f"dim {dim}" for dim in range(len(shape))),
        shape=shape,
        axes=axes or ((),) * len(shape),
        degrees=degrees,
        unreduced=unreduced_axes(sharding),
        element_bytes=array.dtype.itemsize,
        holders=_holders(sharding, shape, axes),
    )


def split_axes(sharding: Sharding, rank: int) -> Axes | None:
    """Return the mesh axes that shard each dim; None if the sharding has no mesh."""
    if not isinstance(sharding, NamedSharding):
        return None
    entries = [*sharding.spec.partitions, *[None] * (rank - len(sharding.spec.partitions))]
    return tuple(() if entry is None else (entry,) if isinstance(entry, str) else tuple(entry) for entry in entries)


def spec_text(sharding: Sharding, rank: int) -> str:
    """Return a sharding's spec as text, `P('fsdp', None)`; without a spec, the class's name; rank: number of dims."""
    axes = split_axes(sharding, rank)
    if axes is None:
        return type(sharding).__name__
    entries = [repr(split[0] if len(split) == 1 else split or None) for split in axes]
    if unreduced := unreduced_axes(sharding):
        entries.append(f"unreduced={{{', '.join(map(repr, unreduced))}}}")
    return f"P({', '.join(entries)})"


def type_text(array: Any, sharding: Sharding) -> str:
    """Return an array's type with its sharding, as JAX prints it: `float32[8@X,16]`."""
    axes = split_axes(sharding, len(array.shape)) or ((),) * len(array.shape)
    dims = [
        f"{size}@{_axes_text(split)}" if split else str(size) for size, split in zip(array.shape, axes, strict=True)
    ]
    unreduced = unreduced_axes(sharding)
    return f"{array.dtype}[{','.join(dims)}]" + (f"{{U:{_axes_text(unreduced)}}}" if unreduced else "")


def _axes_text(axes: tuple[str, ...]) -> str:
    """Return mesh axes as in a type: `X`, `(X,Y)`."""
    return axes[0] if len(axes) == 1 else f"({','.join(axes)})"


def unreduced_axes(sharding: Sharding) -> tuple[str, ...]:
    """Return the mesh axes over which each device holds a partial sum of an array."""
    return tuple(sorted(sharding.spec.unreduced)) if isinstance(sharding, NamedSharding) else ()


def check_concrete(array: Any, name: str) -> None:
    """Raise for a traced value."""
    if isinstance(array, Tracer):
        raise MeshwrightError(
            f"{name} is being traced and has no devices yet; show what the jitted function returns, or use"
            " jax.debug.inspect_array_sharding inside it"
        )


def _holders(sharding: Sharding, shape: tuple[int, ...], axes: Axes | None) -> tuple[Holder, ...]:
    """Return every device of a sharding with the position of the shard that JAX assigns to it.

    axes: the mesh axes that shard each dim; None without a mesh.
    """
    if axes is not None and isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, AbstractMesh):
        return tuple(device_blocks(shape, axes, dict(sharding.mesh.shape)))
    places = _places(sharding)
    return tuple(
        Holder(device.id, places.get(device.id, {}), tuple(map(_span, block, shape)))
        for device, block in sharding.devices_indices_map(shape).items()
        if block is not None
    )


def _places(sharding: Sharding) -> Mapping[int, Mapping[str, int]]:
    """Return the mesh coordinates of each device, by its id; empty without a mesh."""
    if not isinstance(sharding, NamedSharding):
        return {}
    import numpy as np

    names = sharding.mesh.axis_names
    return {
        device.id: dict(zip(names, position, strict=True)) for position, device in np.ndenumerate(sharding.mesh.devices)
    }


def _span(part: slice, size: int) -> Span:
    start, stop, _ = part.indices(size)
    return start, stop


@dataclass(frozen=True)
class Row:
    """One array of a tree. Without a sharding it has 0 copies and no bytes on a device.

    type: the type as JAX prints it, `float32[8@X,16]`. spec: the partition spec, `P('X', None)`. copies: number of
    devices with the same shard.
    """

    path: str
    type: str
    shape: tuple[int, ...]
    spec: str
    local_shape: tuple[int, ...]
    total_bytes: int
    bytes_per_device: int
    copies: int


def tree_rows(tree: Any) -> tuple[Row, ...]:
    """Return a row for each array of a tree, in JAX's order. Raises if the tree has no arrays."""
    leaves, _ = tree_flatten_with_path(tree)
    if isinstance(tree, Sharding):
        raise MeshwrightError(
            "a sharding has no shape to show; give mw.show(jax.ShapeDtypeStruct(shape, dtype, sharding=sharding))"
        )
    if not any(hasattr(leaf, "shape") for _, leaf in leaves):
        raise MeshwrightError(f"{type(tree).__name__} holds no arrays to show")
    return tuple(_row(keystr(path, simple=True, separator=".") or "array", leaf) for path, leaf in leaves)


def plan_rows(plan: Plan) -> tuple[Row, ...]:
    """Return a row for each parameter of a plan's model and each array of its batch, without using devices."""
    degrees = plan.mesh.layout
    mesh = AbstractMesh(tuple(degrees.values()), tuple(degrees), axis_types=(AxisType.Explicit,) * len(degrees))
    layout = ShardingContext(plan.mesh, rules_of(plan.strategy))
    params = abstract_params(plan.workload, layout, mesh, plan.strategy)
    return tree_rows({**params, "batch": abstract_batch(plan.workload, layout, mesh, plan.strategy)})


def program_rows(plan: ProgramPlan) -> tuple[Row, ...]:
    """Return a row for each array argument of a planned function, without using devices."""
    found = zip(plan.program.arguments, plan.program.traced.jaxpr.in_avals, plan.abstract().in_shardings, strict=True)
    return tuple(
        _row(path, ShapeDtypeStruct(aval.shape, aval.dtype, sharding=sharding)) for (path, _), aval, sharding in found
    )


def table_sketch(rows: Sequence[Row], *, owner: str = "") -> Sketch:
    """Return a table of the rows, with totals in its title. owner: text in the title that names what has the arrays."""
    total, local = (sum(getattr(row, name) for row in rows) for name in ("total_bytes", "bytes_per_device"))
    counts = show_count(len(rows), "array"), show_bytes(total), f"{show_bytes(local)} a device"
    title = "   ".join((*([owner] if owner else []), *counts))
    panel = Panel(
        cells=tuple(tuple(map(Cell, _texts(row))) for row in rows),
        rows=tuple(row.path for row in rows),
        columns=("type", "a device holds", "bytes", "copies", "in all"),
        frame="table",
    )
    return Sketch(title=title, panels=(panel,))


def _row(path: str, leaf: Any) -> Row:
    check_concrete(leaf, path)
    sharding = getattr(leaf, "sharding", None)
    if not isinstance(sharding, Sharding):
        # A NumPy array, a number, or an abstract array.
        shape, dtype = tuple(getattr(leaf, "shape", ())), getattr(leaf, "dtype", None)
        if dtype is None:
            return Row(path, type(leaf).__name__, shape, "not placed", (), 0, 0, 0)
        text = f"{dtype}[{','.join(map(str, shape))}]"
        return Row(path, text, shape, "not placed", (), math.prod(shape) * dtype.itemsize, 0, 0)
    held = live_holdings(leaf, name=path)
    return Row(
        path=path,
        type=type_text(leaf, sharding),
        shape=held.shape,
        spec=spec_text(sharding, len(held.shape)),
        local_shape=held.local_shape,
        total_bytes=math.ceil(math.prod(held.shape) * held.element_bytes),
        bytes_per_device=held.bytes_per_device,
        copies=held.copies,
    )


def _texts(row: Row) -> tuple[str, ...]:
    """Return the cells of a row. If the sharding has no mesh, its class is printed after the type."""
    kind = row.type if row.spec.startswith("P(") else f"{row.type} {row.spec}"
    if not row.copies:
        return kind, "-", "-", "-", show_bytes(row.total_bytes) if row.total_bytes else "-"
    local = f"[{','.join(map(str, row.local_shape))}]"
    return kind, local, show_bytes(row.bytes_per_device), str(row.copies), show_bytes(row.total_bytes)
