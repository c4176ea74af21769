"""Shard pass for low-rank branches: their two matmuls, and the norms that DoRA divides by."""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.description.step.ir import Array, Dim, axes_of
from meshwright.description.step.layer import Dims, Linear, vector_dims
from meshwright.description.step.parameter_tree import RANK
from meshwright.description.step.passes.nodes import (
    Exchange,
    Layout,
    Phases,
    Product,
    Weight,
    Work,
    outermost_first,
    weight_of,
)
from meshwright.record import Kind


def factor(path: str, rows: tuple[Dim, ...], inputs: Dims, outputs: Dims, layout: Layout) -> tuple[Weight, Product]:
    """Return one of the two weights of a low-rank branch, and the matmul with it.

    Args:
        path: the weight's path.
        rows: the dims of the tokens that are multiplied by it.
        inputs, outputs: (logical axis, size) of the weight's dims.
        layout: the layout.
    """
    weight = weight_of(path, (*inputs, *outputs), axes_of(rows), layout)
    inner, columns = layout.used(inputs), layout.used(outputs)
    return weight, Product(name=path, rows=rows, inner=inner, columns=columns, weight=weight)


def column_norms(op: Linear, rank: int, name: str, path: str, layout: Layout) -> Iterator[Work]:
    """Yield the work that computes the column norms of a weight plus its low-rank branch, for all outputs.

    Squares are summed over the axes that split the weight's inputs, in storage or, with ZeRO 1 and 2, in use.

    Args:
        op: the matmul.
        rank: the rank of its branch.
        name: the name of the norms.
        path: the weight's path.
        layout: the layout.
    """
    of_layer = layout.used if layout.is_gathered_once else layout.stored
    inner, columns, whole = of_layer(op.inputs), of_layer(op.outputs), layout.used(vector_dims(op.outputs))
    yield Product(
        name=f"{path} norms", rows=inner, inner=layout.stored(((RANK, rank),)), columns=columns, passes="forward"
    )
    summed = outermost_first(axes_of(inner))
    gathered = outermost_first(axis for axis in axes_of(columns) if axis not in axes_of(whole))
    phases: Phases = ("forward", "recompute")
    moves: tuple[tuple[Kind, tuple[str, ...], tuple[Dim, ...]], ...] = (
        ("all-reduce", summed, columns),
        ("all-gather", gathered, whole),
    )
    for kind, axes, dims in moves:
        if axes:
            yield Exchange(name=name, kind=kind, axes=axes, array=Array(name, dims, width="float32"), phases=phases)
