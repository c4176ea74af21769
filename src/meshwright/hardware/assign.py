"""Which physical axes of a torus each mesh axis takes: whole ones where that is possible, else parts of them.

The choice is that of `jax.experimental.mesh_utils.create_device_mesh` (JAX 0.10.2), step by step: a plan is about the
mesh that JAX will make.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import combinations

Part = tuple[int, ...]
"""How much of each physical axis a mesh axis takes; 1 is nothing of it."""


def assign(sizes: tuple[int, ...], degrees: tuple[int, ...]) -> tuple[list[Part], bool]:
    """The part of the physical axes that each degree takes, and whether a physical axis had to be split.

    `degrees` are those of the mesh axes, outermost first; their product is that of `sizes`.
    """
    inward = tuple(reversed(degrees))
    parts = _whole_axes(sizes, inward)
    is_split = parts is None
    return list(reversed(_split_axes(sizes, inward) if parts is None else parts)), is_split


def _whole_axes(sizes: tuple[int, ...], degrees: tuple[int, ...]) -> list[Part] | None:
    """Whole physical axes for each degree, more of them before fewer; None where a degree finds none left."""
    free, parts = set(range(len(sizes))), []
    for degree in degrees:
        taken = _product_of(sizes, sorted(free), degree)
        if taken is None:
            return None
        free -= taken
        parts.append(tuple(size if axis in taken else 1 for axis, size in enumerate(sizes)))
    return parts


def _product_of(sizes: tuple[int, ...], free: list[int], degree: int) -> set[int] | None:
    """The first of the largest sets of free axes whose product is a degree; the empty one for 1."""
    if degree == 1:
        return set()
    for count in range(len(free), 0, -1):
        for axes in combinations(free, count):
            if math.prod(sizes[axis] for axis in axes) == degree:
                return set(axes)
    return None


def _split_axes(sizes: tuple[int, ...], degrees: tuple[int, ...]) -> list[Part]:
    """Parts of physical axes for each degree.

    Prime by prime the degrees and the axes have the same factors, so whatever one takes, the others find theirs.
    """
    left, parts = sizes, []
    for degree in degrees:
        best = max(_factors(left, degree), key=lambda part: _preference(part, sizes, left))
        left = tuple(size // taken for size, taken in zip(left, best, strict=True))
        parts.append(best)
    return parts


def _preference(part: Part, sizes: tuple[int, ...], left: tuple[int, ...]) -> tuple[int, int, int, Part]:
    """What JAX prefers a part for: much of whole axes, many of them, axes others have taken from, the first axes."""
    whole = [taken for taken, size in zip(part, sizes, strict=True) if taken == size > 1]
    shared = [taken for taken, size, rest in zip(part, sizes, left, strict=True) if rest < size]
    return math.prod(whole), len(whole), math.prod(shared), part


def _factors(sizes: tuple[int, ...], degree: int) -> Iterator[Part]:
    """Every way to write a degree as a product of one divisor of each size."""
    if not sizes:
        if degree == 1:
            yield ()
        return
    for taken in range(1, math.gcd(sizes[0], degree) + 1):
        if sizes[0] % taken == 0 and degree % taken == 0:
            for rest in _factors(sizes[1:], degree // taken):
                yield (taken, *rest)
