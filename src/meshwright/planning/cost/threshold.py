"""Conditions under which a matmul is compute bound, in terms of its local dims: `M_x > 5100`.

The flops of a local matmul are 2 times the product of its local dims. The bytes of an array are the product of the
array's local dims times bytes per element. So flops per byte are a ratio of dims: 2·B·M_x·E / (2·B·E) = M_x. The matmul
is compute bound if this ratio exceeds the flops that the chip executes in the time of one byte (MaxText's sharding
guide calls both numbers arithmetic intensity).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from meshwright.description.notation.array import ShardedArray, subscript
from meshwright.description.notation.legality import Sizes
from meshwright.description.notation.steps import Multiply

LocalDims = Mapping[str, tuple[str, ...]]
"""The mesh axes that split each dim, by dim: `{"M": ("X",)}` for the local dim `M_x`."""


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
    """The condition that one sum of ratios is larger than another.

    As text, a side without dims is on the right: `M_x > 5100`, `X_y < 1`.
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

    against: the kind of traffic. condition: the inequality; for network traffic it assumes links used in both
    directions, as in rings of very many chips. here: the inequality for the actual links; None if it differs by less
    than a percent. links: the actual links that determine the time of the collectives.
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
    """Return the condition under which local matmuls take longer than reading, writing or sending local arrays.

    arrays: (array, flops that the chip executes in the time of one byte of it). With one matmul and one array, the
    condition is a bound on dims: `M_x > 5100`, or `0.125 > 2550`, which is never true, if all dims cancel. With several
    arrays it is `5100/M_x + 2550/B_y < 1`. With several matmuls both sides are written in full.
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
    """Return the flops per combination of indices: 2 (multiply and add), or 1 if no dim is contracted."""
    return 2 if len(product_dims(product)) > len(product.result.dims) else 1


def number(value: float) -> str:
    """Format a number in a threshold: whole from 100 on, three figures below."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def _local(dims: LocalDims) -> tuple[str, ...]:
    """Return each local dim in the notation: `M_x`."""
    return tuple(dim + subscript(axes) for dim, axes in dims.items())


def _product(factors: tuple[str, ...]) -> str:
    """Join factors with dots."""
    return "·".join(factors)
