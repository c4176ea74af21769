"""A mesh shape as a `jax.sharding.Mesh`: over real devices, or abstract."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.experimental import mesh_utils
from jax.sharding import AbstractMesh, AxisType, Mesh

from meshwright.errors import MeshwrightError
from meshwright.hardware import System
from meshwright.mesh import MeshShape


def build_mesh(shape: MeshShape, devices: Sequence[Any] | None = None) -> Mesh:
    """The mesh of `shape` over `devices` (default: all devices), every axis explicit.

    `jax.make_mesh` orders devices by their topology. Axes are listed outermost first, so that the axes that communicate
    most are on neighbours. Several TPU slices go through `mesh_over_slices`.
    """
    found = jax.devices() if devices is None else list(devices)
    if len(found) != shape.num_devices:
        raise MeshwrightError(f"mesh {shape} wants {shape.num_devices} devices; {len(found)} are there")
    slices = {device.slice_index for device in found if device.platform == "tpu"}
    if len(slices) > 1:
        return mesh_over_slices(shape.layout, found, len(slices))
    return jax.make_mesh(tuple(shape.layout.values()), tuple(shape.layout), axis_types=_explicit(shape), devices=found)


def mesh_over_slices(degrees: Mapping[str, int], devices: Sequence[Any], num_slices: int) -> Mesh:
    """A mesh over several slices: the outermost axes cross slices, every axis is explicit.

    `jax.make_mesh` accepts one slice only (JAX 0.10.2).
    """
    across = across_slices(degrees, num_slices)
    within = tuple(degree // share for degree, share in zip(degrees.values(), across, strict=True))
    array = mesh_utils.create_hybrid_device_mesh(within, across, devices, allow_split_physical_axes=True)
    return Mesh(array, tuple(degrees), axis_types=(AxisType.Explicit,) * len(degrees))


def across_slices(degrees: Mapping[str, int], num_slices: int) -> tuple[int, ...]:
    """The factor of each axis's degree that crosses slices; the outermost axes are used first.

    Raises where the degrees do not contain the number of slices.
    """
    left, across = num_slices, []
    for degree in degrees.values():
        across.append(math.gcd(degree, left))
        left //= across[-1]
    if left > 1:
        shown = ",".join(f"{axis}={degree}" for axis, degree in degrees.items() if degree > 1)
        raise MeshwrightError(f"{num_slices} slices do not divide the axes of mesh {shown}")
    return tuple(across)


def within_slice(system: System, mesh: Mapping[str, int]) -> dict[str, int]:
    """The degree of each axis inside one slice. Each slice runs its own program and numbers its own devices."""
    shares = across_slices(mesh, system.num_slices)
    return {axis: degree // share for (axis, degree), share in zip(mesh.items(), shares, strict=True)}


def abstract_mesh(shape: MeshShape) -> AbstractMesh:
    """The mesh of `shape` without devices, for tracing and for types."""
    return AbstractMesh(tuple(shape.layout.values()), tuple(shape.layout), axis_types=_explicit(shape))


def _explicit(shape: MeshShape) -> tuple[AxisType, ...]:
    return (AxisType.Explicit,) * len(shape.layout)
