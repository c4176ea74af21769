"""The formats in which a server stores the weights of layers: integers or fp8, with scales along the contraction.

A weight is a matrix [inputs, columns] on each device, its inputs cut into groups; each group of a column has a scale.
Groups are of successive inputs, and no group is on two devices. So where the mesh splits the inputs finer than a
format's group, groups are smaller; a group of a checkpoint is then cut in parts that have the same scale. `int8` and
`fp8` have one group on a device, and so has a checkpoint with one scale for each column. Routers, the embedding table,
the output head, norms and biases keep their own dtype.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal, NamedTuple

from meshwright.description.step.parameter_tree import Parameter
from meshwright.description.step.rules import Rules, local_parameter_shape
from meshwright.description.step.trained import LEAST_BLOCK, can_be_quantised, summed_dims
from meshwright.errors import MeshwrightError
from meshwright.mesh import MeshShape

WeightDtype = Literal["int8", "int4", "fp8"]


class WeightFormat(NamedTuple):
    """How weights are stored in a dtype.

    largest: the absolute value to which a group's largest element is scaled. group: inputs of a group; None for all
    that a device has. scale_bytes, zero_bytes: bytes of a scale and of a zero point.
    """

    bits: int
    largest: float
    group: int | None
    scale_bytes: int
    zero_bytes: int = 0


WEIGHT_FORMATS: Mapping[str, WeightFormat] = {
    "int8": WeightFormat(8, 127, None, 4),
    "int4": WeightFormat(4, 7, 128, 2),
    "fp8": WeightFormat(8, 448, None, 4),
}
"""{`WeightDtype`: its format}. fp8 is e4m3."""

WHOLE_COLUMN = -1
"""The size of group of a checkpoint that has one group for all inputs of a column, as GPTQ's and AWQ's files say it."""


class MatrixShape(NamedTuple):
    """One device's part of a weight as matrices: how many (layers times experts), and the sizes of each.

    group: inputs of a group.
    """

    num_matrices: int
    num_groups: int
    group: int
    columns: int

    def nbytes(self, form: WeightFormat) -> float:
        """Return the bytes of values, scales and zero points."""
        of_values = self.num_groups * self.group * form.bits / 8
        return self.num_matrices * self.columns * (of_values + self.num_groups * (form.scale_bytes + form.zero_bytes))


def has_format(parameter: Parameter) -> bool:
    """Whether a server stores a parameter in a `WeightFormat`: the weights of matmuls in layers, except routers'."""
    return can_be_quantised(parameter) and parameter.role == "product"


def matrix_shape(
    parameter: Parameter,
    form: WeightFormat,
    *,
    mesh: MeshShape,
    rules: Rules,
    what: str = "a weight",
) -> MatrixShape:
    """Return one device's part of a weight as matrices. what: the weight's name in error messages.

    Raises:
        MeshwrightError: groups would be so small that scales take as much memory as values, or odd with 4 bits.
    """
    local = local_parameter_shape(parameter, mesh=mesh, rules=rules, what=what)
    dims = summed_dims(parameter)
    # A device's successive inputs: those within the last dim that is split.
    last_split = max((dim for dim in dims if local[dim] != parameter.shape[dim]), default=dims[0])
    run = math.prod(local[last_split : dims[-1] + 1])
    inputs, whole = (math.prod(shape[dim] for dim in dims) for shape in (local, parameter.shape))
    wanted = form.group or whole
    size = inputs if wanted >= whole else math.gcd(wanted, run)
    why = None
    if (form.group or form.bits < 8) and size < LEAST_BLOCK:
        why = "whose scales take as much memory as values"
    elif form.bits < 8 and size % 2:
        why = "and values in 4 bits are stored in pairs"
    if why is not None:
        raise MeshwrightError(
            f"{what} is {list(parameter.shape)}, of which mesh {mesh} gives a device {run} successive inputs; groups of"
            f" {wanted} would be cut to {size}, {why}: split the inputs less, or use int8"
        )
    columns = math.prod(local[dims[-1] + 1 :])
    return MatrixShape(math.prod(local[: dims[0]]), inputs // size, size, columns)
