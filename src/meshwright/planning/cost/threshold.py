"""Sizes from which a matmul is compute bound, in terms of its dims: `M_x > 5100`.

The flops of a local matmul are 2 times the product of its local dims, the bytes of an array the product of the array's
local dims times bytes per element. So flops per byte is a product of dims: 2·B·M_x·E / (2·B·E) = M_x. It is compared
with the flops that the chip does in the time a byte takes (MaxText's sharding guide calls both arithmetic intensity).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from meshwright.description.notation.array import ShardedArray, subscript
from meshwright.description.notation.legality import Sizes
from meshwright.description.notation.steps import Multiply

LocalDims = Mapping[str, tuple[str, ...]]
"""The mesh axes that split each dim, and so determine the part that one device holds."""


@dataclass(frozen=True)
class Ratio:
    """`coefficient` times the product of the local dims `above`, divided by that of the local dims `below`."""

    coefficient: float
    above: tuple[str, ...] = ()
    below: tuple[str, ...] = ()

    def __str__(self) -> str:
        factor = () if self.coefficient == 1 and self.above else (number(self.coefficient),)
        below = _product(self.below) if len(self.below) < 2 else f"({_product(self.below)})"
        return _product(factor + self.above) + (f"/{below}" if below else "")


@dataclass(frozen=True)
class Inequality:
    """The condition that one sum of ratios exceeds another.

    As text it has the bare number on the right: `M_x > 5100`, `X_y < 1`.
    """

    larger: tuple[Ratio, ...]
    smaller: tuple[Ratio, ...]

    def __str__(self) -> str:
        larger, smaller = (" + ".join(map(str, side)) for side in (self.larger, self.smaller))
        is_bare = not any(ratio.above or ratio.below for ratio in self.larger)
        has_dims = any(ratio.above or ratio.below for ratio in self.smaller)
        return f"{smaller} < {larger}" if is_bare and has_dims else f"{larger} > {smaller}"


@dataclass(frozen=True)
class Threshold:
    """Condition under which matmuls are compute bound: their flops take longer than memory or network traffic.

    condition: against a network, it assumes links used both ways, as in rings of very many chips. here: the condition
    on the actual links, if it differs by a percent; else None. links: the links that determine the time of the
    collectives.
    """

    against: Literal["memory", "network"]
    condition: Inequality
    here: Inequality | None = None
    links: tuple[str, ...] = ()


def product_dims(product: Multiply) -> LocalDims:
    """Return the mesh axes of each dim of a matmul, contracted dims included."""
    return {dim: array.axes_of(dim) for array in product.operands for dim in array.dims}


def array_dims(array: ShardedArray) -> LocalDims:
    """Return the mesh axes of each dim of an array."""
    return dict(zip(array.dims, array.axes, strict=True))


def flops_per_byte(product: Multiply, array: ShardedArray, sizes: Sizes) -> Ratio:
    """Return the flops of a local matmul per byte of an array, in terms of their dims; equal dims cancel."""
    flops, held = product_dims(product), array_dims(array)
    coefficient = _operations(product) / sizes.element_bytes
    for dim in flops.keys() & held.keys():
        coefficient *= sizes.degree(held[dim]) / sizes.degree(flops[dim])
    above = tuple(dim + subscript(axes) for dim, axes in flops.items() if dim not in held)
    below = tuple(dim + subscript(axes) for dim, axes in held.items() if dim not in flops)
    return Ratio(coefficient, above, below)


def inequality(
    products: tuple[Multiply, ...], arrays: Sequence[tuple[ShardedArray, float]], sizes: Sizes
) -> Inequality:
    """Return the condition for matmuls to take longer than the bytes of the arrays: `M_x > 5100`.

    Each array comes with the chip's flops in the time of one of its bytes. With one matmul and one array the condition
    is a bound on dims (`0.125 > 2550`, never true, if all dims cancel); with several arrays it is `5100/M_x + 2550/B_y
    < 1`; with several matmuls both sides are written in full.
    """
    first, *others = products
    if others:
        left = tuple(Ratio(_operations(product), _local(product_dims(product))) for product in products)
        right = tuple(Ratio(flops * sizes.element_bytes, _local(array_dims(array))) for array, flops in arrays)
        return Inequality(left, right)
    ratios = [(flops_per_byte(first, array, sizes), flops) for array, flops in arrays]
    if len(ratios) > 1:
        # Ratios of the same dims are combined.
        sums: dict[tuple[tuple[str, ...], tuple[str, ...]], float] = {}
        for ratio, flops in ratios:
            dims = ratio.below, ratio.above
            sums[dims] = sums.get(dims, 0) + flops / ratio.coefficient
        return Inequality((Ratio(1),), tuple(Ratio(coefficient, *dims) for dims, coefficient in sums.items()))
    ratio, flops = ratios[0]
    if ratio.above:
        return Inequality((Ratio(1, ratio.above, ratio.below),), (Ratio(flops / ratio.coefficient),))
    if ratio.below:
        return Inequality((Ratio(ratio.coefficient / flops),), (Ratio(1, ratio.below),))
    return Inequality((ratio,), (Ratio(flops),))


def say_threshold(threshold: Threshold) -> str:
    """Format a threshold: `compute bound when M_x > 5100; here (ICI x: line of 4) when M_x > 7650`."""
    text = f"compute bound when {threshold.condition}"
    if threshold.against == "memory":
        return f"{text} (memory)"
    return f"{text}; here ({' and '.join(threshold.links)}) when {threshold.here}" if threshold.here else text


def _operations(product: Multiply) -> int:
    """Return the flops for each index of all dims: 2 (multiply and add), or 1 if no dim is contracted."""
    return 2 if len(product_dims(product)) > len(product.result.dims) else 1


def number(value: float) -> str:
    """Format a number in a threshold: whole from 100 on, three figures below."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def _local(dims: LocalDims) -> tuple[str, ...]:
    """Write local dims in the notation."""
    return tuple(dim + subscript(axes) for dim, axes in dims.items())


def _product(factors: tuple[str, ...]) -> str:
    """Join factors with dots."""
    return "·".join(factors)
