"""Slices of a torus: legal shapes, axes that wrap, and the degrees of mesh axes between and within slices."""

from __future__ import annotations

import math
from collections.abc import Mapping

from meshwright.description.hardware.chip import Chip, SliceForm, Torus
from meshwright.errors import MeshwrightError
from meshwright.units import show_degrees


def wraps(torus: Torus, shape: tuple[int, ...]) -> tuple[bool, ...]:
    """Return whether each axis of a slice closes into a ring.

    With optical switches between cubes, every axis of a slice of whole cubes wraps, and no axis of a smaller slice.
    Without them, an axis wraps iff it is as long as the full pod's (jax-ml.github.io/scaling-book/tpus).
    """
    if torus.cube is not None:
        return (all(size % torus.cube == 0 for size in shape),) * len(shape)
    return tuple(size == torus.wrap_size for size in shape)


def has_form(torus: Torus, shape: tuple[int, ...], form: SliceForm | None) -> bool:
    """Whether a slice has a form (`chip.SliceForm`); False for None."""
    match form:
        case "square":
            return min(shape) == max(shape) >= 4
        case "solid":
            return min(shape) > 1
        case "wrapped":
            return all(wraps(torus, shape))
        case None:
            return False


def check_slice(chip: Chip, torus: Torus, shape: tuple[int, ...]) -> None:
    """Raise if no slice has this shape: it has a wrong rank, exceeds the pod, or is not one of the legal shapes."""
    text = "x".join(map(str, shape))
    if len(shape) != torus.rank:
        example = "x".join(map(str, torus.slices[-1]))
        raise MeshwrightError(
            f"{chip.name}:{text} has {len(shape)} axes; a {chip.name} slice has {torus.rank}: {example}"
        )
    if math.prod(shape) > math.prod(torus.max_slice):
        pod, most = "x".join(map(str, torus.max_slice)), math.prod(torus.max_slice)
        raise MeshwrightError(
            f"{chip.name}:{text} has {math.prod(shape)} chips; the largest slice is {pod} = {most},"
            f" beyond it use several: 2*{chip.name}:{pod}"
        )
    is_cubes = torus.cube is not None and all(size % torus.cube == 0 for size in shape)
    if sorted(shape) not in map(sorted, torus.slices) and not is_cubes:
        raise MeshwrightError(f"{chip.name}:{text} is not a slice; slices are {_offered(torus)}, axes in any order")


def slice_of(chip: Chip, torus: Torus, num_chips: int) -> tuple[int, ...]:
    """Return the shape of a slice of `num_chips` chips: from `Torus.slices`, or the most cubic shape of whole cubes.

    The error for an impossible number names the nearest possible ones.
    """
    shape = _shape_of(torus, num_chips)
    if shape is None:
        counts = {math.prod(shape) for shape in torus.slices}
        if torus.cube is not None:
            step = torus.cube**torus.rank
            counts.update(range(step, math.prod(torus.max_slice) + 1, step))
        counts = sorted(count for count in counts if _shape_of(torus, count))
        near = [*[c for c in counts if c < num_chips][-1:], *[c for c in counts if c > num_chips][:1]]
        raise MeshwrightError(
            f"{chip.name}:{num_chips} is not a slice; the nearest have {' or '.join(map(str, near))} chips,"
            f" and slices are {_offered(torus)}"
        )
    return shape


def across_slices(degrees: Mapping[str, int], num_slices: int) -> dict[str, int]:
    """Return, for each mesh axis, the number of slices that it extends over: a factor of its degree.

    The outermost axes, which communicate least, extend over slices first. Raises if the number of slices is not a
    product of factors of the degrees.
    """
    left, across = num_slices, {}
    for axis, degree in degrees.items():
        across[axis] = math.gcd(degree, left)
        left //= across[axis]
    if left > 1:
        raise MeshwrightError(f"{num_slices} slices do not divide the axes of mesh {show_degrees(degrees)}")
    return across


def within_slice(degrees: Mapping[str, int], num_slices: int) -> dict[str, int]:
    """Return the degree of each axis inside one slice. Each slice runs its own program and numbers its own devices."""
    across = across_slices(degrees, num_slices)
    return {axis: degree // across[axis] for axis, degree in degrees.items()}


def _shape_of(torus: Torus, num_chips: int) -> tuple[int, ...] | None:
    """Return the shape of a slice of `num_chips` chips, as `slice_of` does; None if no slice has so many."""
    for shape in torus.slices:
        if math.prod(shape) == num_chips:
            return shape
    if torus.cube is None or num_chips % torus.cube**torus.rank or num_chips > math.prod(torus.max_slice):
        return None
    cubes = _squarest(num_chips // torus.cube**torus.rank, torus.rank)
    return tuple(torus.cube * count for count in cubes)


def _squarest(product: int, rank: int) -> tuple[int, ...]:
    """Return `rank` factors of `product` in ascending order, those with the smallest sum."""
    if rank == 1:
        return (product,)
    splits = ((d, *_squarest(product // d, rank - 1)) for d in range(1, product + 1) if product % d == 0)
    return tuple(sorted(min(splits, key=sum)))


def _offered(torus: Torus) -> str:
    """Return the legal shapes of slices as text for messages."""
    shapes = ", ".join("x".join(map(str, shape)) for shape in torus.slices)
    if torus.cube is None:
        return shapes
    cube = "x".join([str(torus.cube)] * torus.rank)
    return f"{shapes} and whole cubes of {cube}, up to {math.prod(torus.max_slice)} chips"
