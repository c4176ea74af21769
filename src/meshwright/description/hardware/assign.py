"""Assign physical axes of a torus to mesh axes: whole ones if possible, else parts of them.

Mirrors `jax.experimental.mesh_utils.create_device_mesh` (JAX 0.10.2), so that plans are for the mesh that JAX makes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import combinations

Part = tuple[int, ...]
"""The part of each physical axis that a mesh axis uses, as a size; 1 if it does not use the axis."""


def assign(sizes: tuple[int, ...], degrees: tuple[int, ...]) -> tuple[list[Part], bool]:
    """Assign parts of the physical axes to the mesh axes; also return whether a physical axis is split.

    Args:
        sizes: sizes of the physical axes.
        degrees: degrees of the mesh axes, outermost first, with the same product.
    """
    inner_first = degrees[::-1]
    whole = _whole_axes(sizes, inner_first)
    if whole is not None:
        return whole[::-1], False
    # Degrees and axes have the same prime factors, so any choice leaves enough for the other degrees.
    left, parts = sizes, list[Part]()
    for degree in inner_first:
        best = max(_factors(left, degree), key=lambda part: _preference(part, sizes, left))
        left = tuple(size // taken for size, taken in zip(left, best, strict=True))
        parts.append(best)
    return parts[::-1], True


def _whole_axes(sizes: tuple[int, ...], degrees: tuple[int, ...]) -> list[Part] | None:
    """Return whole physical axes for each degree, as many as possible; None if a degree is not a product of sizes."""
    free, parts = set(range(len(sizes))), []
    for degree in degrees:
        sets = (some for count in range(len(free), 0, -1) for some in combinations(sorted(free), count))
        fitting = (some for some in sets if math.prod(sizes[axis] for axis in some) == degree)
        taken = () if degree == 1 else next(fitting, None)
        if taken is None:
            return None
        free -= set(taken)
        parts.append(tuple(size if axis in taken else 1 for axis, size in enumerate(sizes)))
    return parts


def _preference(part: Part, sizes: tuple[int, ...], left: tuple[int, ...]) -> tuple[int, int, int, Part]:
    """Sort key of JAX's preference: more devices in whole axes, more whole axes, axes already shared, first axes."""
    whole = [taken for taken, size in zip(part, sizes, strict=True) if taken == size > 1]
    shared = [taken for taken, size, rest in zip(part, sizes, left, strict=True) if rest < size]
    return math.prod(whole), len(whole), math.prod(shared), part


def _factors(sizes: tuple[int, ...], degree: int) -> Iterator[Part]:
    """Yield every way to write a degree as a product of one divisor of each size."""
    if not sizes:
        if degree == 1:
            yield ()
        return
    for taken in range(1, math.gcd(sizes[0], degree) + 1):
        if sizes[0] % taken == 0 and degree % taken == 0:
            for rest in _factors(sizes[1:], degree // taken):
                yield (taken, *rest)
