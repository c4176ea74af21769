"""Muon's part of the update: which parameters are matrices, and how matrices are distributed for orthogonalisation.

Newton-Schulz needs whole matrices. The matrices of a parameter, one per layer and expert, are distributed over the
devices that shard or replicate it: replicas each take a part of the matrices, and an all-to-all over the axes that
split each dim turns shards into whole matrices. Results return by the reverse all-to-all and a gather over replicas.
Zero matrices are added if the number of devices does not divide the matrices.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from typing import NamedTuple

from meshwright.description.step.ir import Array, Communicate, Dim, Region
from meshwright.description.step.model import Model
from meshwright.description.step.parameter_tree import STACKED, Parameter, leaves, parameters
from meshwright.description.step.passes.pipeline import is_spmd_pipeline, stage_slots
from meshwright.description.step.strategy import Strategy
from meshwright.description.step.workload import Workload
from meshwright.mesh import LAYOUT, MeshShape

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Coefficients of X, X Xᵀ X and (X Xᵀ)² X in a Newton-Schulz iteration (github.com/KellerJordan/Muon)."""

ITERATIONS = 5

RMS = 0.2
"""Root mean square of an update, chosen so that AdamW's learning rates and decay apply (arXiv:2502.16982, 2.2)."""


class Matrix(NamedTuple):
    """How a parameter's dims form matrices: `num_stacked` dims that count them, `num_rows` row dims, then columns."""

    num_stacked: int
    num_rows: int

    def sizes(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """Return the rows and columns of one matrix of a parameter with this shape."""
        end = self.num_stacked + self.num_rows
        return math.prod(shape[self.num_stacked : end]), math.prod(shape[end:])


def matrix_of(parameter: Parameter) -> Matrix | None:
    """Return how a parameter's dims form matrices; None if AdamW updates the parameter.

    Weights of matmuls within layers are matrices. Tables, norms, biases, adapters and weights of one row or column are
    not.
    """
    if parameter.role != "product" or not parameter.is_stacked or not parameter.num_inputs:
        return None
    stacked = sum(axis in (*STACKED, "expert") for axis in parameter.axes)
    found = Matrix(stacked, parameter.num_inputs)
    return found if min(found.sizes(parameter.shape)) > 1 else None


def is_matrix(parameter: Parameter) -> bool:
    """Whether Muon orthogonalises a parameter's updates."""
    return matrix_of(parameter) is not None


def count_symbol(parameter: Parameter) -> str:
    """Return the name of the symbolic dim (`Extents`) whose size is a parameter's number of matrices."""
    return f"matrices of {parameter.axes[0]}{' and experts' if 'expert' in parameter.axes else ''}"


def program_devices(mesh: MeshShape, strategy: Strategy) -> int:
    """Return the number of devices that run one program: all, or one stage's if each stage has its own program."""
    return mesh.num_devices // (1 if is_spmd_pipeline(mesh, strategy) else mesh.pp)


def matrix_counts(model: Model, mesh: MeshShape, strategy: Strategy) -> dict[str, int]:
    """Return how many matrices of a parameter the devices of one program orthogonalise, by `count_symbol(parameter)`.

    Added zero matrices are included. Parameters with the same symbol have the same number.
    """
    found: dict[str, int] = {}
    for _, parameter in leaves(parameters(model)):
        if not is_matrix(parameter):
            continue
        parts, is_staged = 1, mesh.pp > 1 and "layers" in parameter.axes
        count = stage_slots(parameter.num_layers, mesh, strategy) if is_staged else parameter.num_layers
        if is_staged and is_spmd_pipeline(mesh, strategy):
            parts = mesh.pp
        if "expert" in parameter.axes:
            parts *= mesh.ep
            count *= parameter.shape[parameter.axes.index("expert")] // mesh.ep
        devices = program_devices(mesh, strategy) // parts
        found[count_symbol(parameter)] = -(-count // devices) * devices * parts
    return found


def matrices(workload: Workload) -> dict[str, Parameter]:
    """Return the parameters that Muon updates, by path: those that form matrices and are not frozen."""
    found = leaves(parameters(workload.model))
    return {path: each for path, each in found if is_matrix(each) and path not in workload.frozen_paths}


def matrices_per_device(workload: Workload, mesh: MeshShape, strategy: Strategy) -> Iterator[tuple[Parameter, int]]:
    """Yield each parameter that Muon updates, and how many of its matrices one device orthogonalises."""
    counts, devices = matrix_counts(workload.model, mesh, strategy), program_devices(mesh, strategy)
    for parameter in matrices(workload).values():
        yield parameter, counts[count_symbol(parameter)] // devices


def matrix_moves(
    path: str, parameter: Parameter, dims: tuple[Dim, ...], live: Collection[str]
) -> Iterator[Communicate]:
    """Yield the collectives that distribute a parameter's matrices over devices and return the results.

    Args:
        path: the parameter's path.
        parameter: its declaration.
        dims: its dims in storage.
        live: the mesh axes larger than 1.
    """
    matrix = matrix_of(parameter)
    assert matrix is not None
    stacked, inner = dims[: matrix.num_stacked], dims[matrix.num_stacked :]
    split = [axis for dim in stacked for axis in dim.axes]
    stored = {axis for dim in inner for axis in dim.axes}
    copies = tuple(axis for axis in LAYOUT if axis in live and axis not in (*split, *stored))
    count = Dim(count_symbol(parameter), None, (*split, *copies))
    shares = Array("matrices", (count, *inner))
    for dim in inner:
        if dim.axes:
            yield _move(f"matrices of {path}", "all-to-all", dim.axes, shares, times=2)
    if copies:
        whole = Array("matrices", (count._replace(axes=tuple(split)), *inner))
        yield _move(f"matrices of {path} to copies", "all-gather", copies, whole)


def short_and_long(parameter: Parameter) -> tuple[int, int]:
    """Return the sizes of the shorter and the longer dim of a parameter's matrices."""
    matrix = matrix_of(parameter)
    assert matrix is not None
    short, long = sorted(matrix.sizes(parameter.shape))
    return short, long


def matrix_products(parameter: Parameter) -> tuple[tuple[int, int, int], ...]:
    """Return (rows, inner dim, columns) of each matmul of an iteration: X Xᵀ, its square, and their sum times X."""
    short, long = short_and_long(parameter)
    return ((short, long, short), (short, short, short), (short, short, long))


def _move(name: str, kind: str, axes: tuple[str, ...], array: Array, times: int = 1) -> Communicate:
    """Return a collective of the update; times: how often a step runs it."""
    return Communicate(
        name=name, kind=kind, axes=axes, phase="update", region=Region("update"), array=array, times=times,  # type: ignore[arg-type]
        of_weight=True,
    )  # fmt: skip
