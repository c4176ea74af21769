"""Compile and run a sharded matmul."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax import Array
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from meshwright.description.notation.array import ShardedArray
from meshwright.description.notation.inference import Inference
from meshwright.description.notation.steps import Implementation
from meshwright.errors import MeshwrightError
from meshwright.execution.runtime.modes import Mode, automatic, explicit, manual, overlapped
from meshwright.execution.runtime.terms import as_terms, shape_of_terms, spec_of_terms, term_dims
from meshwright.units import show_mesh


@dataclass(frozen=True)
class CompiledProduct:
    """A sharded matmul, compiled for a mesh in one of the modes of `modes`."""

    inference: Inference
    mesh: Mesh
    mode: Mode
    program: jax.stages.Compiled

    @property
    def hlo(self) -> str:
        """The optimized program as text; `hlo.text.hlo_text(program)` also prints its larger constants."""
        return self.program.as_text() or ""

    def run(self, *arrays: Any) -> Array:
        """Return the global result, sharded as inferred. An unreduced result is summed after the program.

        arrays: global operands in the order of the notation. Raises if their number or their shapes are wrong.
        """
        operands, result = self.inference.operands, self.inference.result
        if len(arrays) != len(operands):
            raise MeshwrightError(f"the product has {len(operands)} operands; {len(arrays)} are given")
        for value, array in zip(arrays, operands, strict=True):
            shape = tuple(self.inference.sizes.dims[dim] for dim in array.dims)
            if np.shape(value) != shape:
                raise MeshwrightError(
                    f"{array} has the shape {list(shape)}; the array given has {list(np.shape(value))}"
                )
        found = self.program(*map(self._place, arrays, operands))
        if not result.unreduced:
            return found
        if self.mode == "auto":
            return found.sum(term_dims(result))
        return jax.reshard(found, NamedSharding(self.mesh, P(*(axes or None for axes in result.axes))))

    def _place(self, value: Any, array: ShardedArray) -> Array:
        terms = as_terms(value, array, self.inference.sizes)
        return jax.device_put(terms, NamedSharding(self.mesh, spec_of_terms(array)))


def compile_product(
    inference: Inference,
    mesh: Mesh,
    *,
    mode: Mode = "explicit",
    implementation: Implementation | None = None,
    dtype: Any = np.float32,
) -> CompiledProduct:
    """Compile a sharded matmul in one of the modes.

    Args:
      inference: the matmul with its derived shardings.
      mesh: must have the axes and degrees that the shardings were derived for; axis types do not matter.
      mode: auto, explicit, manual or overlapped.
      implementation: the steps to run, one of the implementations in `inference`; default: `inference.implementation`.
      dtype: dtype of the operands.

    Raises:
        MeshwrightError: the mesh is not the one that the implementations were inferred for.
    """
    degrees = inference.sizes.degrees
    if dict(mesh.shape) != dict(degrees):
        raise MeshwrightError(
            f"the implementations were inferred for mesh {show_mesh(degrees)}; this one is {show_mesh(mesh.shape)}"
        )
    axis_type = AxisType.Auto if mode == "auto" else AxisType.Explicit
    mesh = mesh.update(axis_types=(axis_type,) * len(mesh.axis_names))
    body = {"auto": automatic, "explicit": explicit, "manual": manual, "overlapped": overlapped}[mode]
    abstract = [
        jax.ShapeDtypeStruct(
            shape_of_terms(array, inference.sizes), dtype, sharding=NamedSharding(mesh, spec_of_terms(array))
        )
        for array in inference.operands
    ]
    with jax.set_mesh(mesh):
        lowered = jax.jit(body(inference.operands, implementation or inference.implementation, mesh)).lower(*abstract)
    return CompiledProduct(inference, mesh, mode, lowered.compile())


def make_product_mesh(degrees: Mapping[str, int]) -> Mesh:
    """Return a mesh over the first devices; degrees: {axis: degree}, outermost first. Raises if there are too few."""
    found, wanted = jax.devices(), math.prod(degrees.values())
    if len(found) < wanted:
        raise MeshwrightError(f"mesh {show_mesh(degrees)} needs {wanted} devices; there are {len(found)}")
    return jax.make_mesh(tuple(degrees.values()), tuple(degrees), devices=found[:wanted])
