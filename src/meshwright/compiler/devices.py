"""The devices of a system that is not there, and a mesh over them. To be used in the process that compiles for it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.experimental import mesh_utils, topologies
from jax.sharding import AxisType, Mesh

from meshwright.compiler.targets import topology
from meshwright.errors import MeshwrightError
from meshwright.hardware import System
from meshwright.runtime.mesh import mesh_over_slices


def system_devices(system: System) -> Sequence[Any]:
    """The `jax.Device`s of a system: simulated ones of a CPU, described ones of TPUs and GPUs."""
    if system.chip.kind == "cpu":
        return jax.devices()
    return topologies.get_topology_desc(**topology(system)).devices


def lay_devices(system: System, mesh: Mapping[str, int]) -> tuple[Mesh, str]:
    """A mesh with some axes and degrees over a system's devices, every axis explicit, and in words how it was laid.

    By `jax.make_mesh`, which gives each mesh axis whole physical ones; where there are no such axes, by
    `mesh_utils.create_device_mesh` with physical axes split. Over several slices the outermost axes cross them.
    """
    devices, degrees = system_devices(system), tuple(mesh.values())
    if math.prod(degrees) != len(devices):
        shown = ",".join(f"{axis}={degree}" for axis, degree in mesh.items())
        raise MeshwrightError(f"mesh {shown} has {math.prod(degrees)} devices; {system} has {len(devices)}")
    types = (AxisType.Explicit,) * len(mesh)
    if system.num_slices > 1:
        return mesh_over_slices(mesh, devices, system.num_slices), "mesh_utils.create_hybrid_device_mesh"
    try:
        return jax.make_mesh(degrees, tuple(mesh), axis_types=types, devices=devices), "jax.make_mesh"
    except NotImplementedError:  # no mesh axis is a product of whole physical ones
        array = mesh_utils.create_device_mesh(degrees, devices, allow_split_physical_axes=True)
        return Mesh(array, tuple(mesh), axis_types=types), "mesh_utils.create_device_mesh, physical axes split"
