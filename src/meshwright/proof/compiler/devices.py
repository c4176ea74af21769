"""The JAX devices of a described system, and a mesh over them; used in the process that compiles."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.experimental import mesh_utils, topologies
from jax.sharding import AxisType, Mesh

from meshwright.description.hardware.system import System
from meshwright.errors import MeshwrightError
from meshwright.execution.runtime.mesh import mesh_over_slices
from meshwright.proof.compiler.program import MeshMethod
from meshwright.proof.compiler.targets import topology
from meshwright.units import show_mesh


def system_devices(system: System) -> Sequence[Any]:
    """Return the `jax.Device`s of a system: simulated CPU devices, or described TPUs or GPUs that are not present."""
    if system.chip.kind == "cpu":
        return jax.devices()
    return topologies.get_topology_desc(**topology(system)).devices


def make_device_mesh(system: System, mesh: Mapping[str, int]) -> tuple[Mesh, MeshMethod]:
    """Return a mesh over all of a system's devices, with axes of type Explicit, and the method that arranged it.

    `jax.make_mesh` gives each mesh axis whole physical axes; where that is impossible, physical axes are split. Over
    several slices the outermost mesh axes cross slices.

    Raises:
        MeshwrightError: the product of the degrees in `mesh` is not the system's number of devices.
    """
    devices, degrees = system_devices(system), tuple(mesh.values())
    if math.prod(degrees) != len(devices):
        shown = show_mesh(mesh)
        raise MeshwrightError(f"mesh {shown} has {math.prod(degrees)} devices; {system} has {len(devices)}")
    types = (AxisType.Explicit,) * len(mesh)
    if system.num_slices > 1:
        return mesh_over_slices(mesh, devices, system.num_slices), MeshMethod.OVER_SLICES
    try:
        return jax.make_mesh(degrees, tuple(mesh), axis_types=types, devices=devices), MeshMethod.MAKE_MESH
    except NotImplementedError:  # no mesh axis is a product of whole physical ones
        array = mesh_utils.create_device_mesh(degrees, devices, allow_split_physical_axes=True)
        return Mesh(array, tuple(mesh), axis_types=types), MeshMethod.SPLIT_PHYSICAL_AXES
