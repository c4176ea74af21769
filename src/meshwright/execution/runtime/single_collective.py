"""A single collective on a mesh, to run and time."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import PartitionSpec as P

from meshwright.errors import MeshwrightError
from meshwright.record import Kind


def build_collective(
    kind: Kind, degrees: Mapping[str, int], axes: tuple[str, ...], nbytes: int
) -> tuple[Callable[[Array], Array], Array]:
    """Return a jitted collective over `axes` of a mesh, and the float32 array to pass to it.

    Args:
      kind: the collective.
      degrees: the mesh as {axis: degree}, outermost first; it uses the first devices.
      axes: the mesh axes that the collective communicates over.
      nbytes: bytes, on each device, of an all-gather's result or of another collective's operand; rounded down to whole
        float32 elements.

    Raises:
      MeshwrightError: the mesh needs more devices than exist, or a device would have no element.
    """
    degree, total = math.prod(degrees[axis] for axis in axes), math.prod(degrees.values())
    if total > len(jax.devices()):
        raise MeshwrightError(f"the mesh needs {total} devices; there are {len(jax.devices())}")
    mesh = jax.make_mesh(tuple(degrees.values()), tuple(degrees), devices=jax.devices()[:total])
    local = nbytes // 4 // degree if kind == "all-gather" else nbytes // 4 // degree * degree
    if local < 1:
        raise MeshwrightError(f"{nbytes} bytes over {degree} devices leave less than one float32 each")
    # Each device has its own row, so that the compiler cannot assume equal values.
    spec = P(tuple(degrees))
    inside = {
        "all-gather": lambda x: jax.lax.all_gather(x, axes, axis=1, tiled=True),
        "reduce-scatter": lambda x: jax.lax.psum_scatter(x, axes, scatter_dimension=1, tiled=True),
        "all-reduce": lambda x: jax.lax.psum(x, axes),
        "all-to-all": lambda x: jax.lax.all_to_all(x, axes, 1, 1, tiled=True),
        "collective-permute": lambda x: jax.lax.ppermute(x, axes, [(i, (i + 1) % degree) for i in range(degree)]),
    }[kind]
    exchange = jax.jit(jax.shard_map(inside, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))
    values = np.broadcast_to(np.arange(total, dtype=np.float32)[:, None], (total, local))
    return exchange, jax.device_put(jnp.asarray(values), jax.NamedSharding(mesh, spec))
