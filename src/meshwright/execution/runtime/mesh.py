"""Build the `jax.sharding.Mesh` of a mesh shape, and read the platform of the current mesh."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh

from meshwright.description.hardware.slices import across_slices, within_slice
from meshwright.errors import MeshwrightError
from meshwright.mesh import MeshShape


def build_mesh(shape: MeshShape, devices: Sequence[Any] | None = None) -> Mesh:
    """Return the mesh of `shape` over `devices` (default: all), with every axis explicit.

    If a single process has more devices than the mesh needs, the mesh uses the first ones, with a warning.
    `jax.make_mesh` orders devices by their topology. Axes are outermost first, so that the axes that communicate most
    are on neighbouring devices.

    Raises:
        MeshwrightError: the number of devices differs from the mesh's.
    """
    found = jax.devices() if devices is None else list(devices)
    if devices is None and len(found) > shape.num_devices and jax.process_count() == 1:
        warnings.warn(f"mesh {shape} takes the first {shape.num_devices} of {len(found)} devices", stacklevel=2)
        found = found[: shape.num_devices]
    if len(found) != shape.num_devices:
        raise MeshwrightError(f"mesh {shape} needs {shape.num_devices} devices; there are {len(found)}")
    slices = {device.slice_index for device in found if device.platform == "tpu"}
    if len(slices) > 1:
        return mesh_over_slices(shape.layout, found, len(slices))
    types = (AxisType.Explicit,) * len(shape.layout)
    return jax.make_mesh(tuple(shape.layout.values()), tuple(shape.layout), axis_types=types, devices=found)


def with_axis_type(mesh: Mesh, kind: AxisType) -> Mesh:
    """Return the same mesh with all axes of one type."""
    return Mesh(mesh.devices, mesh.axis_names, axis_types=(kind,) * len(mesh.axis_names))


def mesh_platform() -> str:
    """Return the platform of the current mesh's devices: `cpu`, `gpu` or `tpu`; without a mesh, JAX's default."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    platform = device.platform if device is not None else jax.default_backend()
    return "gpu" if platform == "cuda" else platform  # JAX's name of GPUs that are only described.


def mesh_over_slices(degrees: Mapping[str, int], devices: Sequence[Any], num_slices: int) -> Mesh:
    """Return a mesh over several TPU slices, with every axis explicit; the outermost axes cross slices.

    degrees: degree of each axis, outermost first. `jax.make_mesh` accepts only one slice (JAX 0.10.2).
    """
    within, across = (tuple(f(degrees, num_slices).values()) for f in (within_slice, across_slices))
    array = mesh_utils.create_hybrid_device_mesh(within, across, devices, allow_split_physical_axes=True)
    return Mesh(array, tuple(degrees), axis_types=(AxisType.Explicit,) * len(degrees))
