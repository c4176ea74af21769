"""From when on a product is compute bound, in words of its dims: `M_x > 5100`.

The flops of a local product are 2 times the product of its local dims, the bytes of an array the product of the
array's, so flops per byte is a product of dims: 2·B·M_x·E / (2·B·E) = M_x. It is held against the flops that the chip
does in the time a byte takes (MaxText's sharding guide calls both arithmetic intensity).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from meshwright.notation import Multiply, ShardedArray, Sizes
from meshwright.notation.array import subscript

LocalDims = Mapping[str, tuple[str, ...]]
"""Dims and the mesh axes that split each: what one device holds of them."""


@dataclass(frozen=True)
class Ratio:
    """`coefficient` x the local dims above / the local dims below."""

    coefficient: float
    above: tuple[str, ...]
    below: tuple[str, ...]

    def __str__(self) -> str:
        factor = () if self.coefficient == 1 and self.above else (number(self.coefficient),)
        return _product(factor + self.above) + (f"/{_in_one(self.below)}" if self.below else "")


def product_dims(product: Multiply) -> LocalDims:
    """The local dims of a product, summed ones too."""
    return {dim: array.axes_of(dim) for array in product.operands for dim in array.dims}


def array_dims(array: ShardedArray) -> LocalDims:
    """The local dims of an array."""
    return dict(zip(array.dims, array.axes, strict=True))


def flops_per_byte(product: Multiply, array: ShardedArray, sizes: Sizes) -> Ratio:
    """The flops of a local product for each byte of an array, in words of their dims; equal ones cancel."""
    flops, held = product_dims(product), array_dims(array)
    coefficient = _operations(product) / sizes.element_bytes
    for dim in flops.keys() & held.keys():
        coefficient *= sizes.degree(held[dim]) / sizes.degree(flops[dim])
    above = tuple(dim + subscript(axes) for dim, axes in flops.items() if dim not in held)
    below = tuple(dim + subscript(axes) for dim, axes in held.items() if dim not in flops)
    return Ratio(coefficient, above, below)


def inequality(products: tuple[Multiply, ...], arrays: Sequence[tuple[ShardedArray, float]], sizes: Sizes) -> str:
    """What must hold for the products to take longer than the bytes of the arrays: `M_x > 5100`.

    Each array comes with the flops that the chip does in the time of one of its bytes. With one product and one array
    a bound on dims (where all of them cancel, a bare `0.125 > 2550`: it never holds); with several arrays
    `5100/M_x + 2550/B_y < 1`; with several products the two sides in full.
    """
    first, *others = products
    if others:
        left = (
            _product((str(_operations(product)), *map(_local, product_dims(product).items()))) for product in products
        )
        right = (
            _product((number(flops * sizes.element_bytes), *map(_local, array_dims(array).items())))
            for array, flops in arrays
        )
        return f"{' + '.join(left)} > {' + '.join(right)}"
    ratios = [(flops_per_byte(first, array, sizes), flops) for array, flops in arrays]
    if len(ratios) > 1:
        return f"{_sum([Ratio(flops / ratio.coefficient, ratio.below, ratio.above) for ratio, flops in ratios])} < 1"
    ratio, flops = ratios[0]
    if ratio.above:
        return f"{Ratio(1, ratio.above, ratio.below)} > {number(flops / ratio.coefficient)}"
    if ratio.below:
        return f"{_product(ratio.below)} < {number(ratio.coefficient / flops)}"
    return f"{ratio} > {number(flops)}"


def _operations(product: Multiply) -> int:
    """The flops for each element of the product of its dims."""
    return 2 if len(product_dims(product)) > len(product.result.dims) else 1


def _sum(ratios: list[Ratio]) -> str:
    """Ratios added up, those of the same dims made one."""
    sums: dict[tuple[tuple[str, ...], tuple[str, ...]], float] = {}
    for ratio in ratios:
        sums[ratio.above, ratio.below] = sums.get((ratio.above, ratio.below), 0) + ratio.coefficient
    return " + ".join(str(Ratio(coefficient, *dims)) for dims, coefficient in sums.items())


def number(value: float) -> str:
    """A number as a threshold shows it: whole from 100 on, three figures below."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def _local(dim_and_axes: tuple[str, tuple[str, ...]]) -> str:
    """A local dim as the notation writes it."""
    dim, axes = dim_and_axes
    return dim + subscript(axes)


def _product(factors: tuple[str, ...]) -> str:
    """Factors with dots between."""
    return "·".join(factors)


def _in_one(factors: tuple[str, ...]) -> str:
    """A divisor: in parentheses where it is of several factors."""
    return _product(factors) if len(factors) == 1 else f"({_product(factors)})"
