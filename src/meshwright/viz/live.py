"""What each device holds of a live `jax.Array`, or of anything with a shape, a dtype and a sharding."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from jax.core import Tracer
from jax.sharding import AbstractMesh, NamedSharding, Sharding

from meshwright.errors import MeshwrightError
from meshwright.mesh import divisors
from meshwright.viz.holdings import Holder, Holdings, Span, device_blocks

Axes = tuple[tuple[str, ...], ...]


def live_holdings(array: Any, *, name: str = "array") -> Holdings:
    """What each device holds of a live array or a `jax.ShapeDtypeStruct`, with any kind of sharding.

    Devices have JAX's ids. On an abstract mesh they are numbered along its last axis first. Raises for a traced value
    and for one without a sharding.
    """
    check_concrete(array, name)
    sharding = getattr(array, "sharding", None)
    if not isinstance(sharding, Sharding):
        raise MeshwrightError(f"{name} has no sharding; place it with jax.device_put, or pass text in the notation")
    shape = tuple(array.shape)
    axes = split_axes(sharding, len(shape))
    named = sharding if isinstance(sharding, NamedSharding) else None
    degrees = dict(named.mesh.shape) if named else {}
    _check_divides(name, shape, axes or (), degrees)
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
    """The mesh axes that shard each dim; None where the sharding has no mesh."""
    if not isinstance(sharding, NamedSharding):
        return None
    entries = [*sharding.spec.partitions, *[None] * (rank - len(sharding.spec.partitions))]
    return tuple(() if entry is None else (entry,) if isinstance(entry, str) else tuple(entry) for entry in entries)


def spec_text(sharding: Sharding, rank: int) -> str:
    """The spec with an entry for every dim, `P('fsdp', None)`; the class name of a sharding without a spec."""
    axes = split_axes(sharding, rank)
    if axes is None:
        return type(sharding).__name__
    entries = [repr(split[0] if len(split) == 1 else split or None) for split in axes]
    if unreduced := unreduced_axes(sharding):
        entries.append(f"unreduced={{{', '.join(map(repr, unreduced))}}}")
    return f"P({', '.join(entries)})"


def type_text(array: Any, sharding: Sharding) -> str:
    """An array's type with its sharding, as JAX prints it: `float32[8@X,16]`."""
    axes = split_axes(sharding, len(array.shape)) or ((),) * len(array.shape)
    dims = [
        f"{size}@{_axes_text(split)}" if split else str(size) for size, split in zip(array.shape, axes, strict=True)
    ]
    unreduced = unreduced_axes(sharding)
    return f"{array.dtype}[{','.join(dims)}]" + (f"{{U:{_axes_text(unreduced)}}}" if unreduced else "")


def _axes_text(axes: tuple[str, ...]) -> str:
    """Mesh axes as in a type: `X`, `(X,Y)`."""
    return axes[0] if len(axes) == 1 else f"({','.join(axes)})"


def unreduced_axes(sharding: Sharding) -> tuple[str, ...]:
    """The mesh axes over which an array is unreduced."""
    return tuple(sorted(sharding.spec.unreduced)) if isinstance(sharding, NamedSharding) else ()


def check_concrete(array: Any, name: str) -> None:
    """Raise for a traced value."""
    if isinstance(array, Tracer):
        raise MeshwrightError(
            f"{name} is being traced and lies nowhere yet; show what the jitted function returns, or use"
            " jax.debug.inspect_array_sharding inside it"
        )


def _check_divides(name: str, shape: tuple[int, ...], axes: Axes, degrees: Mapping[str, int]) -> None:
    """Raise where a degree does not divide a dim, which is possible for a `ShapeDtypeStruct`."""
    for dim, (size, split) in enumerate(zip(shape, axes, strict=False)):
        degree = math.prod(degrees[axis] for axis in split)
        if size % degree:
            raise MeshwrightError(
                f"{name} of shape {shape} cannot lie so: dim {dim} over {'*'.join(split)}={degree} leaves"
                f" {size} % {degree} = {size % degree}; the degree must be one of {divisors(size)}"
            )


def _holders(sharding: Sharding, shape: tuple[int, ...], axes: Axes | None) -> tuple[Holder, ...]:
    """The devices of a sharding with the blocks that JAX assigns them."""
    if axes is not None and isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, AbstractMesh):
        return tuple(device_blocks(shape, axes, dict(sharding.mesh.shape)))
    places = _places(sharding)
    return tuple(
        Holder(device.id, places.get(device.id, {}), tuple(map(_span, block, shape)))
        for device, block in sharding.devices_indices_map(shape).items()
        if block is not None
    )


def _places(sharding: Sharding) -> Mapping[int, Mapping[str, int]]:
    """The mesh coordinates of each device, by its id; none without a mesh."""
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
