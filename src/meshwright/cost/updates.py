"""What an update sums over devices: the squares of gradients for their norm, and the means that Adafactor takes."""

from __future__ import annotations

import math
from collections.abc import Iterator

from meshwright.cost.model_states import factored_dims
from meshwright.cost.moves import times
from meshwright.mesh import MeshShape
from meshwright.record import Collective
from meshwright.workload import Parameter, Spec, Strategy

_SCALARS_OF_ADAFACTOR = 3
"""Means of squares of a whole array: of its update, and twice of the parameter (`optax.adafactor`)."""


def update_moves(
    path: str, parameter: Parameter, split: Spec, mesh: MeshShape, strategy: Strategy
) -> Iterator[Collective]:
    """What the update of one parameter sums over the axes that split each of its dims, one dim after the other."""
    for dim in split:
        yield times(1, "all-reduce", dim, "update", 4, f"norm of the gradient of {path}")
    if strategy.optimizer != "adafactor":
        return
    for dim in split:
        yield times(_SCALARS_OF_ADAFACTOR, "all-reduce", dim, "update", 4, f"sizes of {path} and its update")
    if factored := factored_dims(parameter.shape):
        local = [size // mesh.degree(axes) for size, axes in zip(parameter.shape, split, strict=True)]
        columns, rows = (4 * math.prod(local) // local[dim] for dim in factored)
        second, first = factored
        yield times(1, "all-reduce", split[first], "update", rows, f"means of rows of {path}")
        yield times(1, "all-reduce", split[second], "update", columns, f"means of columns of {path}")
        yield times(1, "all-reduce", split[second], "update", rows // local[second], f"mean of means of rows of {path}")
